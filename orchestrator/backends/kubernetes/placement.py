"""Rules by which pods of a job may run on a Kubernetes node: selector, required affinity, taints
and the size of the node. Pure.

The scheduler decides in the end. This is used to find out whether nodes that one job gives up are
of any use to another, so what cannot be judged counts as possible.
Sources: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from kubernetes.utils.quantity import parse_quantity

from holdfast.orchestrator.kube.names import Document

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HARD_EFFECTS = ("NoSchedule", "NoExecute")
PASSING = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints that come and go with the state of a node."""


class KnownNode(NamedTuple):
    """The operator's knowledge of a Kubernetes node."""

    name: str
    labels: Mapping[str, str] = {}
    taints: tuple[Document, ...] = ()
    allocatable: Mapping[str, str] = {}


@dataclass(frozen=True)
class Placement:
    """Constraints on where the pods of a job may run."""

    pod_spec: Document = field(default_factory=dict)

    def allows(self, node: KnownNode) -> bool:
        spec = self.pod_spec
        selector = spec.get("nodeSelector") or {}
        return (
            all(node.labels.get(key) == value for key, value in selector.items())
            and _affinity_allows(spec.get("affinity") or {}, node)
            and all(_tolerates(spec.get("tolerations") or (), taint) for taint in node.taints)
            and _is_large_enough(spec, node)
        )


def _affinity_allows(affinity: Document, node: KnownNode) -> bool:
    required = (affinity.get("nodeAffinity") or {}).get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or ()
    return not terms or any(_term_matches(term, node) for term in terms)


def _term_matches(term: Document, node: KnownNode) -> bool:
    fields = {"metadata.name": node.name}
    return all(
        _matches(rule, values)
        for kind, values in (("matchExpressions", node.labels), ("matchFields", fields))
        for rule in term.get(kind) or ()
    )


def _matches(rule: Document, values: Mapping[str, str]) -> bool:
    value, wanted = values.get(rule["key"]), rule.get("values") or ()
    match rule["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return True  # Gt and Lt are rare: possible


def _tolerates(tolerations: Any, taint: Document) -> bool:
    if taint.get("effect") not in HARD_EFFECTS or taint["key"] in PASSING:
        return True
    return any(
        t.get("key") in (None, "", taint["key"])
        and t.get("effect") in (None, "", taint["effect"])
        and (t.get("operator") == "Exists" or t.get("value", "") == taint.get("value", ""))
        for t in tolerations
    )


def _is_large_enough(spec: Document, node: KnownNode) -> bool:
    """An empty node would have room for one pod."""
    if not spec.get("containers") or not node.allocatable:
        return True
    try:
        return all(
            amount <= parse_quantity(node.allocatable.get(name, "0"))  # type: ignore[no-untyped-call]
            for name, amount in requests_of(spec).items()
        )
    except ValueError:
        return True  # the API server reports a quantity that is not valid


def requests_of(spec: Document) -> dict[str, Decimal]:
    """A pod's requests: resource -> amount.

    A limit without a request is a request, and init containers run before the others; see
    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """
    total = dict[str, Decimal]()
    zero = Decimal(0)
    for container in spec["containers"]:
        for name, amount in _requests(container).items():
            total[name] = total.get(name, zero) + amount
    for container in spec.get("initContainers") or ():
        is_sidecar = container.get("restartPolicy") == "Always"
        for name, amount in _requests(container).items():
            before = total.get(name, zero)
            total[name] = before + amount if is_sidecar else max(before, amount)
    for name, text in (spec.get("overhead") or {}).items():
        amount = parse_quantity(text)  # type: ignore[no-untyped-call]
        total[name] = total.get(name, zero) + amount
    return total


def _requests(container: Document) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    requests = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {
        name: parse_quantity(text)  # type: ignore[no-untyped-call]
        for name, text in requests.items()
    }
