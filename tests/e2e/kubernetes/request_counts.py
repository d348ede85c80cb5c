"""What an operator asks of an API server, counted by both: for tests and measurements of scale.

Owns: the user that the operator is, so that the API server can tell its requests from those of
others, and the reading of both counts. Must not: judge them.

The API server counts requests by flow schema, not by user. Service accounts outside kube-system
have one of their own (`service-accounts`), and the operator is the only one here.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig.control_plane import ControlPlane

NAMESPACE = "holdfast-system"
DISPATCHED = re.compile(
    r'^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="service-accounts",'
    r"[^}]*\} ([0-9.e+]+)$",
    re.MULTILINE,
)
OWN = re.compile(
    r'^holdfast_operator_api_requests_total\{resource="([^"]*)",verb="([^"]*)"\} ([0-9.e+]+)$',
    re.MULTILINE,
)

Requests = Counter[tuple[str, str]]
"""(verb, resource) -> requests."""


def operator_kubeconfig(plane: ControlPlane) -> Path:
    """Of a service account that may do everything."""
    kubectl = plane.kubectl(NAMESPACE)
    kubectl.run("create", "namespace", NAMESPACE)
    kubectl.run("create", "serviceaccount", "operator")
    account = f"--serviceaccount={NAMESPACE}:operator"
    kubectl.run("create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", account)
    token = kubectl.run("create", "token", "operator", "--duration=24h").strip()
    return plane.write_kubeconfig("operator", token=token)


def counted_by_server(plane: ControlPlane) -> int:
    """Requests of the operator so far; a watch counts when it begins."""
    page = (plane.request("/metrics") or b"").decode()
    return int(sum(float(number) for number in DISPATCHED.findall(page)))


def counted_by_operator(replica: Replica) -> Requests:
    """The same, by its own /metrics."""
    status, page = replica.get("/metrics")
    assert status == 200, replica.tail()
    return Counter({(verb, what): int(float(n)) for what, verb, n in OWN.findall(page)})


def beside_leases(requests: Requests) -> Requests:
    """Those that jobs cause: the lease is the operator's own, and one for all jobs."""
    return Counter({key: count for key, count in requests.items() if key[1] != "leases"})
