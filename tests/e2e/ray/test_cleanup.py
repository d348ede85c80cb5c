"""Jobs of a Ray cluster without a controller: they are cancelled all the same, or expire."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from holdfast.orchestrator.errors import UserError

from . import cluster_rig
from .jobs import BOUND_S, Job, holdfast
from .records import NAME, cleared, order, record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[cluster_rig.RayRig]:
    with cleared() as cluster:
        yield cluster


def test_a_job_whose_controller_cannot_start_reports_why_and_can_be_cancelled_and_deleted(
    cluster: cluster_rig.RayRig,
) -> None:
    from holdfast.orchestrator.backends.ray import actors
    from holdfast.orchestrator.cli.display import SilentDisplay
    from holdfast.orchestrator.cli.output import stderr
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.hosts.ray import actor

    made = order()
    record(made)

    def broken(order: Any) -> Any:
        raise ModuleNotFoundError("No module named 'nowhere'")

    actor.create(made, broken)
    job = RayTarget(cluster.address).transport(NAME)
    with pytest.raises(actors.ControllerActorGone) as raised:
        job.watch(SilentDisplay(stderr()))
    assert "its controller did not start (ModuleNotFoundError: No module named" in str(raised.value)
    assert f"`holdfast cancel {NAME} --ray {cluster.address}` ends the job" in str(raised.value)
    done = holdfast("cancel", NAME, "--ray", cluster.address)
    assert done.returncode == 0, done.stderr
    state = json.loads(holdfast("status", NAME, "--ray", cluster.address, "--json").stdout)
    assert state["state"] == "cancelled" and "without its controller" in state["reason"]
    done = holdfast("delete", NAME, "--yes", "--ray", cluster.address)
    assert done.returncode == 0, done.stderr
    assert NAME not in holdfast("status", "--ray", cluster.address).stdout


def test_a_job_whose_controller_fails_again_and_again_is_cancelled(
    cluster: cluster_rig.RayRig,
) -> None:
    """Neither the controller nor a command can read the job's journal."""
    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.hosts.ray import actor
    from holdfast.orchestrator.hosts.ray.host import RayHost
    from holdfast.orchestrator.journal.gcs_store import GcsStore

    made = order()
    keys = record(made)
    GcsStore(keys, NAME)._claim()  # an earlier controller
    keys.put("journal/tail-00000001-000001", b"nonsense")
    actor.create(made, RayHost)
    job = RayTarget(cluster.address, answer_s=5.0).find(NAME)
    answer = job.request("cancel", by="me")
    assert "no controller answers" in answer.detail
    view = job.view()
    assert view.state == "cancelled" and "cancelled by me without its controller" in view.reason
    for verb in ("cancel", "suspend", "checkpoint"):
        with pytest.raises(UserError, match=f"job {NAME}: was cancelled .*; nothing to "):
            job.request(verb, by="me")
    assert actor.find(NAME) is None and kv.JobKeyValueStore(NAME).exists(kv.ENDED)


def test_a_controller_that_comes_after_the_end_of_its_job_starts_nothing(
    cluster: cluster_rig.RayRig,
) -> None:
    import ray

    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.hosts.ray import actor
    from holdfast.orchestrator.hosts.ray.host import RayHost

    made = order()
    keys = record(made)
    keys.put(kv.ENDED, b"{}")
    controller = actor.create(made, RayHost)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(controller.watch.remote(-1), timeout=BOUND_S)
    assert cluster_rig.group_names(NAME) == [] and keys.list("journal/") == []


def test_a_job_that_trains_without_a_controller_is_ended_by_cancel(tmp_path: Path) -> None:
    import ray

    from holdfast.orchestrator.hosts.ray import actor

    job = Job(tmp_path, "orphans", 1_000_000)
    try:
        job.running()
        agents = [psutil.Process(job.facts(node)["pid"]) for node in job.members()]
        processes = [one for agent in agents for one in [agent, *agent.children(recursive=True)]]
        ray.kill(actor.find(job.name), no_restart=True)
        assert job.command.wait(BOUND_S) == 1
        assert "its controller was removed from the cluster" in job.output.read_text()
        done = holdfast("cancel", job.name, "--ray", job.cluster.address)
        assert done.returncode == 0, done.stderr
        _gone, alive = psutil.wait_procs(processes, timeout=BOUND_S)
        assert alive == []
        assert cluster_rig.group_names(job.name) == []
        assert job.view().state == "cancelled"
    finally:
        job.end()


def test_a_name_that_another_actor_has_is_free_after_the_refusal(
    cluster: cluster_rig.RayRig, tmp_path: Path
) -> None:
    import ray

    from holdfast.orchestrator.backends.ray import kv, names

    @ray.remote(num_cpus=0)
    class Other:
        pass

    other = Other.options(name=names.controller(NAME), namespace=names.NAMESPACE).remote()
    job = Job(tmp_path, NAME, 10)
    try:
        assert job.command.wait(BOUND_S) == 1
        assert "its controller cannot be created" in job.output.read_text()
        assert "Traceback" not in job.output.read_text()
        assert NAME not in kv.jobs()
    finally:
        ray.kill(other)
        job.end()


@pytest.mark.parametrize(("finished_s_ago", "kept"), [(100, True), (300, False)])
def test_a_finished_job_is_deleted_when_its_ttl_has_passed(
    cluster: cluster_rig.RayRig, finished_s_ago: int, kept: bool
) -> None:
    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.runtime.control_api import view_body
    from holdfast.orchestrator.runtime.observe.view import JobView

    keys = record(order(ttlSecondsAfterFinished=200))
    keys.put("journal/epoch-000001", b"")
    finished_ns = time.time_ns() - finished_s_ago * 10**9
    view = JobView(name=NAME, state="succeeded", finished_ns=finished_ns)
    keys.put(kv.ENDED, json.dumps({"view": view_body(view), "refusal": ""}).encode())
    assert RayTarget(cluster.address).expire([NAME]) == ([] if kept else [NAME])
    assert bool(keys.list("")) is kept


def test_a_job_that_has_not_finished_does_not_expire(cluster: cluster_rig.RayRig) -> None:
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget

    keys = record(order(ttlSecondsAfterFinished=0))
    assert RayTarget(cluster.address).expire([NAME, "unknown"]) == []
    assert keys.list("") != []


def ending(order: Any) -> Any:
    """A host whose job has succeeded, while it still releases nodes."""
    import asyncio
    import json

    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.runtime.control_api import view_body
    from holdfast.orchestrator.runtime.observe.view import JobView

    class Ending:
        def __init__(self) -> None:
            self._asked = asyncio.Event()
            self._view = view_body(JobView(name=order.job, job_id=order.job_id, state="succeeded"))

        async def run(self) -> None:
            await self._asked.wait()
            await asyncio.sleep(1.0)
            ended = json.dumps({"view": self._view, "refusal": ""}).encode()
            await asyncio.to_thread(kv.JobKeyValueStore(order.job).put, kv.ENDED, ended)

        async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
            self._asked.set()
            return {"ok": True, "detail": "", "body": self._view}

        async def watch(self, seen: Any) -> dict[str, Any]:
            raise NotImplementedError

    return Ending()


def test_the_deletion_of_a_finishing_job_waits_for_the_end_record(
    cluster: cluster_rig.RayRig,
) -> None:
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.hosts.ray import actor

    made = order()
    keys = record(made)

    def make_host(given: Any) -> Any:
        return ending(given)

    actor.create(made, make_host)
    job = RayTarget(cluster.address).transport(NAME)
    assert NAME in job.describe_deletion(None)
    assert job.ended is not None
    job.delete(None)
    assert keys.list("") == []


def test_keys_of_an_earlier_job_of_the_same_name_are_ignored(
    cluster: cluster_rig.RayRig, tmp_path: Path
) -> None:
    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.runtime.control_api import view_body
    from holdfast.orchestrator.runtime.observe.view import JobView

    view = view_body(JobView(name=NAME, state="succeeded"))
    kv.JobKeyValueStore(NAME).put(kv.ENDED, json.dumps({"view": view, "refusal": ""}).encode())
    job = Job(tmp_path, NAME, 1000)
    try:
        assert job.until(lambda view: view.step > 0).state == "running"
    finally:
        job.end()


def test_a_request_counts_as_soon_as_a_job_has_a_record(
    cluster: cluster_rig.RayRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job is cancelled before it has a controller."""
    from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
    from holdfast.orchestrator.backends.ray import kv
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.hosts.ray import actor
    from holdfast.orchestrator.journal import gcs_store

    create = kv.JobKeyValueStore.create

    def create_and_cancel(self: Any, key: str, value: bytes) -> bool:
        made = create(self, key, value)
        done = holdfast("cancel", NAME, "--ray", cluster.address)
        assert done.returncode == 0, done.stderr
        return made

    kv.JobKeyValueStore(NAME).put("left", b"by an earlier job")
    with monkeypatch.context() as others:
        others.setattr(kv.JobKeyValueStore, "create", create_and_cancel)
        place = RayTarget(cluster.address)
        place._create(job_from_mapping(order().document), tmp_path, "0" * 16)
    deadline = time.monotonic() + BOUND_S
    while actor.find(NAME) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert place.find(NAME).view().state == "cancelled"
    assert kv.JobKeyValueStore(NAME).list("") == [kv.ENDED, kv.RECORD]
    assert not gcs_store.exists(kv.JobKeyValueStore(NAME))


def test_a_job_whose_deletion_is_interrupted_has_still_ended(
    cluster: cluster_rig.RayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.orchestrator.backends.ray import kv

    keys = kv.JobKeyValueStore(NAME)
    for key in (kv.RECORD, kv.ENDED, "journal/epoch-000001", "nodes"):
        keys.put(key, b"")
    delete, left = kv.JobKeyValueStore.delete, []

    def interrupted(self: Any, *doomed: str) -> None:
        for key in doomed:
            left.append(set(self.list("")))
            delete(self, key)

    monkeypatch.setattr(kv.JobKeyValueStore, "delete", interrupted)
    keys.clear()
    assert len(left) == 4 and keys.list("") == []
    assert all(kv.RECORD in found for found in left), "the name is taken to the end"
    assert all(kv.ENDED in found for found in left if len(found) > 1)


def test_a_job_that_was_refused_without_a_watcher_reports_why_and_can_be_deleted(
    cluster: cluster_rig.RayRig,
) -> None:
    from holdfast.orchestrator.hosts.ray import actor
    from holdfast.orchestrator.hosts.ray.host import RayHost

    made = order(checkpoint={"path": "/proc/nowhere"})
    keys = record(made)
    actor.create(made, RayHost)
    deadline = time.monotonic() + BOUND_S
    while "ended" not in keys.list("") and time.monotonic() < deadline:
        time.sleep(0.1)
    state = json.loads(holdfast("status", NAME, "--ray", cluster.address, "--json").stdout)
    assert state["state"] == "failed"
    assert "spec.checkpoint.path: got /proc/nowhere" in state["reason"]
    done = holdfast("delete", NAME, "--yes", "--ray", cluster.address)
    assert done.returncode == 0, done.stderr
    assert keys.list("") == []


def test_the_journal_replaces_the_status_that_a_controller_refuses(
    cluster: cluster_rig.RayRig,
) -> None:
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget
    from holdfast.orchestrator.hosts.ray import actor

    made = order()
    record(made)

    def make_host(given: Any) -> Any:
        class Refusing:
            async def run(self) -> None:
                import asyncio

                await asyncio.Event().wait()

            async def perform(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
                return {"ok": False, "detail": "spec.checkpoint.path: ...", "body": {}}

        return Refusing()

    actor.create(made, make_host)
    assert RayTarget(cluster.address).find(NAME).view().state == "pending"


def test_a_request_that_a_controller_could_not_record_is_refused(
    cluster: cluster_rig.RayRig,
) -> None:
    import asyncio

    from holdfast.orchestrator.hosts.ray.host import RayHost

    async def scenario() -> dict[str, Any]:
        host = RayHost(order())
        host._serving.set()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.cancel()

        async def perform(verb: str, arguments: dict[str, Any]) -> Any:
            return await done

        host.runtime.control = SimpleNamespace(perform=perform)  # type: ignore[assignment]
        return await host.perform("suspend", {})

    answer = asyncio.run(scenario())
    assert not answer["ok"] and "send it again" in answer["detail"]


LISTENER = """
import logging, sys, time
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
log = logging.getLogger("holdfast.orchestrator.backends.ray.cluster")
log.addHandler(handler)
log.setLevel(logging.DEBUG)
log.propagate = False
from holdfast.orchestrator.backends.ray import cluster
cluster.connect(sys.argv[1])
from ray._private import utils, worker
give_up = time.monotonic() + 30
while not any("lost somewhere" in text for text in messages) and time.monotonic() < give_up:
    gcs = worker.global_worker.gcs_client
    utils.publish_error_to_driver("node_died", "a node was lost somewhere", gcs)
    time.sleep(0.1)
print("the answer")
"""


def test_messages_of_ray_to_all_drivers_are_not_on_stdout(cluster: cluster_rig.RayRig) -> None:
    words = [sys.executable, "-c", LISTENER, cluster.address]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the answer\n"
