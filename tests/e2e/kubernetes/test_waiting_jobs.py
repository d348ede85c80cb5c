"""Waiting jobs, whose conditions say why, on a real API server without nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.replica import Replica, leading
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.unschedulable import (
    Plane,
    gone,
    job,
    message_of,
    names_of,
    pods,
    reason_of,
    wait_message,
    wait_pods,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def jobs(plane: Plane) -> Iterator[Kubectl]:
    yield from fresh(plane.kubectl())


@pytest.fixture(scope="module")
def operator(
    plane: Plane, jobs: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    yield from leading(plane.kubeconfig, tmp_path_factory, jobs.namespace)


def test_a_pod_that_does_not_start_in_time_is_replaced(jobs: Kubectl, operator: Replica) -> None:
    jobs.apply(job("late", kubernetes={"startTimeoutSeconds": 2}))
    first = names_of(wait_pods(jobs, "late", 2))
    found = wait_message(jobs, "late", "not started within 2 s: the scheduler finds no node: ")
    assert found["status"]["state"] == "pending"
    operator.until(
        lambda: names_of(pods(jobs, "late")) and not first & names_of(pods(jobs, "late")),
        "other pods in their place",
    )
    gone(jobs, "late")


def test_a_missing_priority_class_is_named_and_awaited(jobs: Kubectl, operator: Replica) -> None:
    name = f"class-{jobs.namespace}"
    jobs.apply(job("ranked", kubernetes={"priorityClassName": name}))
    found = wait_message(jobs, "ranked", f"no PriorityClass with name {name} was found")
    assert reason_of(found) == "PriorityClassMissing"
    jobs.run("create", "priorityclass", name, "--value=7")
    try:
        for pod in wait_pods(jobs, "ranked", 2):
            assert pod["spec"]["priorityClassName"] == name
            assert pod["spec"]["priority"] == 7
        gone(jobs, "ranked")
    finally:
        jobs.run("delete", "priorityclass", name)


def test_a_missing_runtime_class_is_named(jobs: Kubectl, operator: Replica) -> None:
    template = {"spec": {"runtimeClassName": "nowhere"}}
    jobs.apply(job("sandboxed", kubernetes={"podTemplate": template}))
    found = wait_message(jobs, "sandboxed", 'RuntimeClass "nowhere" not found')
    assert reason_of(found) == "NoRoom"
    gone(jobs, "sandboxed")


# -- the Secret --------------------------------------------------------------------------------
def test_a_foreign_secret_of_the_jobs_name_is_kept_and_named(
    jobs: Kubectl, operator: Replica
) -> None:
    jobs.run("create", "secret", "generic", "taken-agents", "--from-literal=mine=1")
    jobs.apply(job("taken"))
    found = wait_message(jobs, "taken", f"Secret {jobs.namespace}/taken-agents: has another owner")
    assert reason_of(found) == "OperatorWaits"
    assert set(jobs.json("get", "secret", "taken-agents")["data"]) == {"mine"}
    assert pods(jobs, "taken") == []
    jobs.run("delete", "secret", "taken-agents")
    wait_pods(jobs, "taken", 2)
    gone(jobs, "taken")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"data": {"tls.key": null}}', "not usable"),
        ('{"data": {"tls.key": "bm9uc2Vuc2U="}}', "not usable"),
        ('{"stringData": {"token": "another"}}', "edited, and running agents have other keys"),
    ],
    ids=["a-key-taken-out", "a-key-that-is-none", "another-token"],
)
def test_an_edited_secret_blocks_new_pods_until_it_is_deleted(
    jobs: Kubectl, operator: Replica, change: str, message: str
) -> None:
    jobs.apply(job("edited"))
    first = names_of(wait_pods(jobs, "edited", 2))
    before = jobs.json("get", "secret", "edited-agents")["data"]
    jobs.run("patch", "secret", "edited-agents", "--type=merge", f"--patch={change}")
    jobs.run("scale", "trainingjob/edited", "--replicas=3")
    fix = f"kubectl delete secret -n {jobs.namespace} edited-agents"
    found = wait_message(jobs, "edited", f"Secret {jobs.namespace}/edited-agents: {message}")
    assert fix in message_of(found)
    assert names_of(pods(jobs, "edited")) == first, "no pod with other keys"
    jobs.run(*fix.split()[1:])
    wait_pods(jobs, "edited", 3)
    assert jobs.json("get", "secret", "edited-agents")["data"] == before
    gone(jobs, "edited")


def test_a_secret_edited_without_an_operator_is_named(
    control_plane: Plane, jobs: Kubectl, operator: Replica
) -> None:
    """Runs last, because it stops the operator."""
    jobs.apply(job("tampered"))
    wait_pods(jobs, "tampered", 2)
    before = jobs.json("get", "secret", "tampered-agents")["data"]
    operator.kill()
    change = '{"data": {"tls.crt": "bm9uc2Vuc2U="}}'
    jobs.run("patch", "secret", "tampered-agents", "--type=merge", f"--patch={change}")
    operator.start_leading()
    found = wait_message(
        jobs, "tampered", "not usable; delete it and the operator creates it again"
    )
    assert reason_of(found) == "OperatorWaits"
    jobs.run("delete", "secret", "tampered-agents")
    operator.until(
        lambda: (jobs.get("secret", "tampered-agents") or {}).get("data") == before,
        "the Secret to be created again from its copy",
    )
    gone(jobs, "tampered")
