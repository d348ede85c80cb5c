"""Code in real pods: a function of the Python client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from holdfast import Client
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.e2e.kubernetes.jobs import ENDLESS, example
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

BOUND_S = 240
FACTOR = 3


def train(steps: int) -> None:
    import os
    import time

    from holdfast import session

    print("in pod", os.environ["HOSTNAME"], "rank", os.environ["RANK"], flush=True)
    for step in range(steps):
        session.report(step, loss=FACTOR * step, total_steps=steps)
        time.sleep(0.05)
    print("ended after", FACTOR * steps, flush=True)
    time.sleep(2)  # the logs of a pod are gone with it


@pytest.fixture
def client(operator: Operator, cluster_namespace: Kubectl, tmp_path: Path) -> Iterator[Client]:
    operator.ensure_running()
    yield Client(
        kubernetes=True,
        namespace=cluster_namespace.namespace,
        kubeconfig=cluster_namespace.kubeconfig,
        home=tmp_path / "home",
    )
    cluster_namespace.run("delete", "trainingjobs", "--all")


def test_a_function_runs_in_the_pods_of_a_cluster(
    client: Client, cluster_namespace: Kubectl
) -> None:
    job = client.submit(train, args=(200,), nodes=2, workers=1, gpus=0)
    pods = set[str]()

    def two_pods() -> bool:
        pods.update(pod["metadata"]["name"] for pod in cluster_namespace.list("pods"))
        return len(pods) == 2

    until(two_pods, "two pods", timeout_s=BOUND_S, last=lambda: pods)
    lines = list(job.logs(follow=True))
    hosts = {line.split("in pod ")[1].split()[0] for line in lines if "in pod " in line}
    assert hosts == pods, lines
    assert sum("ended after 600" in line for line in lines) == 2, lines
    view = job.wait(BOUND_S)
    assert (view.state, view.step, view.total_steps) == ("succeeded", 199, 200), view.reason
    job.delete()


def test_a_job_is_resized_suspended_and_reported(client: Client, tmp_path: Path) -> None:
    """The same as on this machine and on Ray."""
    seen = JobView(name="")

    def has(true_of: Callable[[JobView], bool], what: str) -> JobView:
        def look() -> bool:
            nonlocal seen
            seen = job.view()
            return true_of(seen)

        until(look, what, timeout_s=BOUND_S, last=lambda: seen)
        return seen

    with chdir(tmp_path):
        job = client.submit(example("by-client", ENDLESS))
    before = has(lambda view: view.world_size == 4 and view.step >= 1, "steps of four workers")
    assert "to 1 node" in job.resize(1)
    smaller = has(lambda view: view.world_size == 2 and view.step > before.step, "two workers")
    assert job.suspend()
    stopped = has(lambda view: view.state == "suspended", "suspended")
    assert stopped.step >= smaller.step
    with pytest.raises(TimeoutError, match="job by-client: has not ended after 3 s"):
        job.wait(timeout_s=3)
    assert job.resume()
    has(lambda view: view.world_size == 2 and view.step > stopped.step, "steps after resume")
    view = job.view()
    assert 0 < view.goodput < 1 and view.steps_lost == 0
    assert view.num_incidents == 2, "the two planned stops"
    assert job.cancel()
    assert job.wait(BOUND_S).state == "cancelled"
    job.delete()
