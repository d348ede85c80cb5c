"""TrainingJobs whose pods are never scheduled, for tests without nodes."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.waiting import until

Document = dict[str, Any]
Plane = ControlPlane | GivenCluster
BOUND_S = 90
"""Usually a second or two is enough."""
IMAGE = "registry.invalid/holdfast/worker:test"


def install(plane: Plane) -> None:
    """Apply the CRD."""
    kubectl = plane.kubectl()
    kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
    kubectl.served(NAME)


def job(name: str, **spec: Any) -> Document:
    """Two nodes whose pods are never scheduled."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": {"script": "train.py"},
            "image": IMAGE,
            "nodes": {"min": 1, "max": 2},
            **spec,
        },
    }


def pods(kubectl: Kubectl, name: str) -> list[Document]:
    """Pods that are not being deleted."""
    found = kubectl.list("pods", f"holdfast.dev/job={name},holdfast.dev/role=node")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def names_of(found: list[Document]) -> set[str]:
    return {one["metadata"]["name"] for one in found}


def wait_pods(kubectl: Kubectl, name: str, count: int) -> list[Document]:
    until(
        lambda: len(pods(kubectl, name)) == count,
        f"{count} pods of {name}",
        timeout_s=BOUND_S,
        last=lambda: (names_of(pods(kubectl, name)), kubectl.get("trainingjob", name)),
    )
    return pods(kubectl, name)


def reason_of(document: Document | None, kind: str = "Ready", field: str = "reason") -> str:
    for one in (document or {}).get("status", {}).get("conditions") or ():
        if one["type"] == kind:
            return str(one[field])
    return ""


def message_of(document: Document | None, kind: str = "Ready") -> str:
    return reason_of(document, kind, "message")


def gone(kubectl: Kubectl, name: str) -> None:
    kubectl.run("delete", "trainingjob", name, "--timeout=90s")


def wait_message(kubectl: Kubectl, name: str, text: str) -> Document:
    return kubectl.wait("trainingjob", name, lambda d: text in message_of(d), f"to say {text!r}")


def wait_reason(kubectl: Kubectl, name: str, reason: str) -> Document:
    return kubectl.wait("trainingjob", name, lambda d: reason_of(d) == reason, f"to have {reason}")
