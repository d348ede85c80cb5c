"""An operator that lacks one right names it where users look, and continues when it gets the right.
test_rights.py tests that the chart's rights suffice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import REPOSITORY
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.unschedulable import (
    BOUND_S,
    Plane,
    gone,
    job,
    message_of,
    reason_of,
    wait_pods,
    wait_reason,
)

pytestmark = pytest.mark.e2e

RBAC = REPOSITORY / "manifests" / "rbac.yaml"
LEASES = {
    "apiGroups": ["coordination.k8s.io"],
    "resources": ["leases"],
    "verbs": ["get", "create", "update"],
}


def rules(resource: str = "", verb: str = "") -> list[dict[str, Any]]:
    """The rights that manifests/ give the operator, without this one."""
    documents = yaml.safe_load_all(RBAC.read_text())
    role = next(one for one in documents if one["metadata"]["name"].endswith("holdfast-operator"))
    found = [copy.deepcopy(rule) for rule in role["rules"]] + [LEASES]
    if resource:
        (rule,) = [one for one in found if one["resources"] == [resource]]
        rule["verbs"].remove(verb)
    return found


class Limited:
    """An operator with a service account and a Role in one namespace."""

    def __init__(self, plane: Plane, namespace: Kubectl, directory: Path) -> None:
        if isinstance(plane, GivenCluster):
            pytest.skip("needs the token of a service account in a kubeconfig of its own")
        self._plane, self._namespace, self._directory = plane, namespace, directory
        self.replica: Replica | None = None

    def start(self, resource: str, verb: str) -> Replica:
        """Start it without this right. Return when it leads."""
        name = self._namespace.namespace
        self._namespace.run("create", "serviceaccount", "operator")
        self.grant(rules(resource, verb))
        account = f"--serviceaccount={name}:operator"
        self._namespace.run("create", "rolebinding", "operator", "--role=operator", account)
        token = self._namespace.run("create", "token", "operator").strip()
        kubeconfig = self._plane.write_kubeconfig(f"limited-{name}", token=token)
        self.replica = Replica(kubeconfig, self._directory, (name,))
        self.replica.start()
        self.replica.wait_leading()
        return self.replica

    def grant(self, wanted: list[dict[str, Any]]) -> None:
        head = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
        self._namespace.apply({**head, "metadata": {"name": "operator"}, "rules": wanted})


@pytest.fixture
def limited(plane: Plane, namespace: Kubectl, tmp_path: Path) -> Iterator[Limited]:
    made = Limited(plane, namespace, tmp_path)
    yield made
    if made.replica is not None:
        assert made.replica.close() == 0, made.replica.tail()


def wait_requests(replica: Replica, verb: str, resource: str, count: int) -> None:
    """Wait until the operator's metrics count this many requests."""

    def tried() -> float:
        for line in replica.get("/metrics")[1].splitlines():
            if f'verb="{verb}"' in line and f'resource="{resource}"' in line:
                return float(line.split()[-1])
        return 0.0

    replica.until(lambda: tried() >= count, f"{count} attempts to {verb} {resource}")


def test_without_the_right_to_create_pods_the_condition_names_right_and_fix(
    limited: Limited, namespace: Kubectl
) -> None:
    replica = limited.start("pods", "create")
    namespace.apply(job("podless"))
    found = wait_reason(namespace, "podless", "MissingRight")
    text = message_of(found)
    assert "2 pods were requested and none was created: missing right: create pods" in text
    assert "bind a role that grants it, see the chart's RBAC" in text, replica.tail()
    limited.grant(rules())
    wait_pods(namespace, "podless", 2)
    gone(namespace, "podless")


def test_without_the_right_to_write_the_status_the_log_and_an_event_name_it_once(
    limited: Limited, namespace: Kubectl
) -> None:
    replica = limited.start("trainingjobs/status", "patch")
    namespace.apply(job("mute"))
    wait_pods(namespace, "mute", 2)
    wait_requests(replica, "patch", "trainingjobs", 3)
    text = "the status cannot be written: missing right: patch trainingjobs/status"
    assert replica.log.read_text().count(text) == 1, "each attempt fails, and one is logged"
    replica.until(
        lambda: any(
            one["reason"] == "StatusNotWritten" and one["message"].startswith(text)
            for one in namespace.list("events", "holdfast.dev/job=mute")
        ),
        "the event",
    )
    limited.grant(rules())
    wait_reason(namespace, "mute", "Unschedulable")
    replica.until(
        lambda: "the status is written again" in replica.log.read_text(), "the operator to log it"
    )
    gone(namespace, "mute")


def test_without_the_right_to_create_events_the_log_names_it_once(
    limited: Limited, namespace: Kubectl
) -> None:
    replica = limited.start("events", "create")
    namespace.apply(job("quiet"))
    wait_pods(namespace, "quiet", 2)
    for size in (3, 4):
        namespace.run("scale", "trainingjob/quiet", f"--replicas={size}")
        wait_pods(namespace, "quiet", size)
    wait_requests(replica, "create", "events", 2)
    text = "events cannot be written: missing right: create events"
    until(lambda: text in replica.log.read_text(), "the log", timeout_s=BOUND_S)
    gone(namespace, "quiet")
    assert replica.log.read_text().count(text) == 1, replica.tail()
    assert namespace.list("events", "holdfast.dev/job=quiet") == []


def test_without_the_right_to_create_secrets_the_operator_waits_and_names_it(
    limited: Limited, namespace: Kubectl
) -> None:
    limited.start("secrets", "create")
    namespace.apply(job("keyless"))
    found = wait_reason(namespace, "keyless", "OperatorWaits")
    assert message_of(found).startswith("missing right: create secrets"), message_of(found)
    assert message_of(found).endswith("see the chart's RBAC; trying again")
    limited.grant(rules())
    wait_pods(namespace, "keyless", 2)
    gone(namespace, "keyless")


def test_a_started_job_stays_known_to_an_operator_that_lacks_a_right(
    plane: Plane, limited: Limited, namespace: Kubectl, tmp_path: Path
) -> None:
    """A suspended job that never started would be left alone."""
    first = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)).start_leading()
    namespace.apply(job("begun"))
    wait_pods(namespace, "begun", 2)
    before = namespace.wait(
        "trainingjob", "begun", lambda d: "jobId" in (d or {}).get("status", {}), "to be known"
    )["status"]
    assert first.close() == 0
    namespace.run(
        "patch", "trainingjob", "begun", "--type=merge", '--patch={"spec":{"suspend":true}}'
    )
    limited.start("secrets", "get")
    found = wait_reason(namespace, "begun", "OperatorWaits")
    for name in ("jobId", "startTime", "checkpointPath"):
        assert found["status"][name] == before[name]
    limited.grant(rules())
    wait_pods(namespace, "begun", 0)
    found = namespace.wait(
        "trainingjob", "begun", lambda d: reason_of(d, "Suspended") == "Suspended", "suspended"
    )
    assert "nothing was started" not in message_of(found, "Suspended")
    gone(namespace, "begun")


def test_without_the_right_to_delete_jobs_expired_ones_stay(
    limited: Limited, namespace: Kubectl
) -> None:
    replica = limited.start("trainingjobs", "delete")
    namespace.apply(job("over"))
    wait_pods(namespace, "over", 2)
    namespace.run("annotate", "trainingjob", "over", "holdfast.dev/cancel=ann")
    namespace.wait(
        "trainingjob", "over", lambda d: "completionTime" in (d or {}).get("status", {}), "ended"
    )
    patch = '--patch={"spec":{"ttlSecondsAfterFinished":0}}'
    namespace.run("patch", "trainingjob", "over", "--type=merge", patch)
    until(
        lambda: any(
            one["reason"] == "NotDeleted" and "missing right: delete trainingjobs" in one["message"]
            for one in namespace.list("events", "holdfast.dev/job=over")
        ),
        "the event", timeout_s=BOUND_S, last=replica.tail,
    )  # fmt: skip
    limited.grant(rules())
    namespace.wait("trainingjob", "over", lambda d: d is None, "to be deleted")
