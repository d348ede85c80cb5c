"""Requests of an operator, as the API server and the operator count them.

The API server counts by flow schema, not by user. Service accounts outside kube-system have their
own flow schema (`service-accounts`), and the operator is the only such account here.
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
    """The kubeconfig of a service account with all rights."""
    kubectl = plane.kubectl(NAMESPACE)
    kubectl.run("create", "namespace", NAMESPACE)
    kubectl.run("create", "serviceaccount", "operator")
    account = f"--serviceaccount={NAMESPACE}:operator"
    kubectl.run("create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin", account)
    token = kubectl.run("create", "token", "operator", "--duration=24h").strip()
    return plane.write_kubeconfig("operator", token=token)


def counted_by_server(plane: ControlPlane) -> int:
    """Requests of the operator so far; a watch counts at its start."""
    page = (plane.request("/metrics") or b"").decode()
    return int(sum(float(number) for number in DISPATCHED.findall(page)))


def counted_by_operator(replica: Replica) -> Requests:
    """The same from the operator's /metrics."""
    status, page = replica.get("/metrics")
    assert status == 200, replica.tail()
    return Counter({(verb, what): int(float(n)) for what, verb, n in OWN.findall(page)})


def beside_leases(requests: Requests) -> Requests:
    """Requests that jobs cause; the lease is one for all jobs."""
    return Counter({key: count for key, count in requests.items() if key[1] != "leases"})
