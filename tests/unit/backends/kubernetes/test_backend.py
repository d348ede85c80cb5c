"""The Kubernetes backend against a fake API server: where a node is, that it will be removed, and
when nodes are released. The contract of all backends is in tests/contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.backends import KUBERNETES_TOPOLOGY_KEYS
from holdfast.orchestrator.backends.kubernetes.backend import KubernetesBackend, OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.backends.kubernetes.pod_lifecycle import PodTiming
from holdfast.orchestrator.core.rank_assignment import order_newcomers
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.protocol.facts import NodeFacts
from tests.unit.api.wrong_jobs import job, script
from tests.unit.backends.kubernetes.queue_fixtures import OWNER, SETTINGS
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually

Document = dict[str, Any]
FACTS = NodeFacts(hostname="h", address="10.0.0.1", data_port=1, slots=8)


def pod(name: str, node_name: str, version: int = 1, **status: Any) -> Document:
    """A running node of the job."""
    state = {"name": names.CONTAINER, "state": {"running": {}}}
    return {
        "metadata": {
            "namespace": OWNER.namespace,
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {names.LABEL_JOB: OWNER.name},
            "ownerReferences": [names.owner_reference(OWNER.name, OWNER.uid)],
        },
        "spec": {"nodeName": node_name},
        "status": {"phase": "Running", "containerStatuses": [state], **status},
    }


def unschedulable(name: str) -> Document:
    """No Kubernetes node has capacity for it."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(name, "", phase="Pending", containerStatuses=[], conditions=[condition])


def kubernetes_node(name: str, **labels: str) -> Document:
    return {"metadata": {"name": name, "labels": labels}}


def training_job(nodes: dict[str, int], **spec: Any) -> TrainingJob:
    return job_from_mapping(job(script(nodes=nodes, **spec), OWNER.name))


class OpenBackend:
    """An open backend and what it has reported."""

    def __init__(self, backend: KubernetesBackend, nodes: NodeInformer) -> None:
        self.backend, self.node_informer = backend, nodes
        self.notices: list[tuple[str, str]] = []
        self.gone: list[tuple[str, str]] = []


@asynccontextmanager
async def opened(
    api: FakeApi,
    nodes: dict[str, int] | None = None,
    timing: PodTiming | None = None,
    **kubernetes: Any,
) -> AsyncIterator[OpenBackend]:
    wanted = training_job(nodes or {"max": 1}, kubernetes=kubernetes)
    async with cluster_of(api) as cluster:
        pod_informer, nodes_seen = PodInformer(cluster), NodeInformer(cluster, 0.01)
        seen: OpenBackend
        backend = KubernetesBackend(
            wanted,
            OWNER,
            OperatorContext(
                cluster, pod_informer, nodes_seen, GangArbiter(), SETTINGS, timing or PodTiming()
            ),
            on_notice=lambda node, detail: seen.notices.append((node, detail)),
        )
        seen = OpenBackend(backend, nodes_seen)
        watching = asyncio.create_task(pod_informer.run())
        try:
            await backend.open(lambda one: seen.gone.append((one.node, one.detail)))
            yield seen
        finally:
            await backend.close(release=False)
            watching.cancel()
            await asyncio.wait([watching])


# -- notices -----------------------------------------------------------------------------------
async def test_a_taint_that_announces_the_end_of_a_machine_is_a_preemption_notice() -> None:
    api = FakeApi(listed=[pod("llm-a", "n1"), pod("llm-b", "n2")])
    spot = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    api.objects["/api/v1/nodes/n1"] = {**kubernetes_node("n1"), "spec": {"taints": [spot]}}
    cordoned = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    api.objects["/api/v1/nodes/n2"] = {**kubernetes_node("n2"), "spec": {"taints": [cordoned]}}
    async with opened(api) as seen:
        informer = seen.backend._shared.pod_informer
        looks = seen.node_informer.watch_notices(informer.machines, informer.look_again)
        watching = asyncio.create_task(looks)
        await eventually(lambda: bool(seen.notices), "a notice")
        informer.look_again("n1")
        informer.look_again("n2")
        watching.cancel()
        await asyncio.wait([watching])
    text = f"its Kubernetes node has the taint {spot['key']} and will be taken away"
    assert seen.notices == [("llm-a", text)]


# -- where a node is ---------------------------------------------------------------------------
def topology_labels(keys: tuple[str, ...], *values: str) -> dict[str, str]:
    return {key: value for key, value in zip(keys, values, strict=True) if value}


@pytest.mark.parametrize(
    ("kubernetes", "keys"),
    [
        ({}, KUBERNETES_TOPOLOGY_KEYS),
        ({"topologyKeys": ["example.com/hall", "example.com/row"]}, None),
    ],
    ids=["default-keys", "keys-of-the-spec"],
)
async def test_topology_comes_from_the_labels_of_the_kubernetes_node(
    kubernetes: dict[str, Any], keys: tuple[str, ...] | None
) -> None:
    keys = keys or tuple(kubernetes["topologyKeys"])
    values = [f"value-{number}" for number in range(len(keys))]
    api = FakeApi(listed=[pod("llm-a", "n1")])
    api.objects["/api/v1/nodes/n1"] = kubernetes_node("n1", **topology_labels(keys, *values))
    async with opened(api, **kubernetes) as seen:
        await eventually(lambda: bool(seen.node_informer.labels("n1")), "the labels")
        facts = seen.backend.facts_of("llm-a", FACTS)
        assert facts.topology == (*values, "n1") and facts.failure_domain == "n1"
        assert seen.backend.facts_of("llm-unknown", FACTS) == FACTS


async def test_ranks_of_one_clique_are_adjacent_whatever_their_node_names() -> None:
    """Zone, block, rack and clique, outermost first: a clique is never split."""
    layout = {  # pod, Kubernetes node -> (zone, block, rack, clique)
        "llm-a": ("n1", ("z1", "b1", "r2", "c3")),
        "llm-b": ("n2", ("z1", "b1", "r1", "c2")),
        "llm-c": ("n3", ("z1", "b1", "r2", "c4")),
        "llm-d": ("n4", ("z1", "b1", "r1", "c1")),
        "llm-e": ("n5", ("z1", "b1", "r2", "c3")),
        "llm-f": ("n6", ("z0", "b9", "r9", "c9")),
        "llm-g": ("n7", ("z1", "b1", "r1", "c2")),
    }
    api = FakeApi(listed=[pod(name, place) for name, (place, _values) in layout.items()])
    for place, values in layout.values():
        labels = topology_labels(KUBERNETES_TOPOLOGY_KEYS, *values)
        api.objects[f"/api/v1/nodes/{place}"] = kubernetes_node(place, **labels)
    async with opened(api) as seen:
        known = seen.node_informer.labels
        await eventually(lambda: all(known(p) for p, _ in layout.values()), "all labels")
        facts_of = seen.backend.facts_of
        nodes = [(name, facts_of(name, FACTS), joined) for joined, name in enumerate(layout)]
        assert order_newcomers(nodes) == (
            "llm-f", "llm-d", "llm-b", "llm-g", "llm-a", "llm-e", "llm-c",
        )  # fmt: skip


# -- a node that is removed --------------------------------------------------------------------
def disrupted(reason: str, message: str = "") -> list[Document]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return [condition | ({"message": message} if message else {})]


@pytest.mark.parametrize(
    ("reason", "message", "detail"),
    [
        (
            "PreemptionByScheduler",
            "default-scheduler: preempting to accommodate a higher priority pod",
            "preempted by a pod of higher priority: default-scheduler: preempting to accommodate "
            "a higher priority pod",
        ),
        ("DeletionByTaintManager", "", "its Kubernetes node was tainted NoExecute"),
        ("EvictionByEvictionAPI", "", "evicted, by a drain for example"),
        ("SomethingNew", "", "it is being removed (SomethingNew)"),
    ],
)
async def test_a_disruption_is_reported_once_while_the_pod_still_runs(
    reason: str, message: str, detail: str
) -> None:
    api = FakeApi(listed=[pod("llm-a", "n1"), pod("llm-b", "n2")])
    async with opened(api) as seen:
        watch = await api.next_watch()
        conditions = disrupted(reason, message)
        watch.send("MODIFIED", pod("llm-a", "n1", 2, conditions=conditions))
        await eventually(lambda: bool(seen.notices), "the notice")
        leaving = pod("llm-a", "n1", 3, conditions=conditions)
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        watch.send("MODIFIED", leaving)
        watch.send("DELETED", leaving)
        await eventually(lambda: bool(seen.gone), "the end")
        assert seen.notices == [("llm-a", detail)]
        assert seen.gone == [("llm-a", f"its pod on n1 is gone: {detail}")]


async def test_a_deleted_pod_is_reported_while_it_still_runs() -> None:
    api = FakeApi(listed=[pod("llm-a", "n1")])
    async with opened(api) as seen:
        watch = await api.next_watch()
        leaving = pod("llm-a", "n1", 2)
        leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        watch.send("MODIFIED", leaving)
        await eventually(lambda: bool(seen.notices), "the notice")
        assert seen.notices == [("llm-a", "its pod is being deleted")] and seen.gone == []


async def test_pods_of_an_earlier_job_of_the_same_name_are_ignored() -> None:
    other = pod("llm-old", "n1")
    other["metadata"]["ownerReferences"][0]["uid"] = "another"
    api = FakeApi(listed=[other, pod("llm-a", "n1")])
    async with opened(api) as seen:
        watch = await api.next_watch()
        watch.send("DELETED", other)
        watch.send("DELETED", pod("llm-a", "n1", 2))
        await eventually(lambda: bool(seen.gone), "the end")
        assert await seen.backend.list_nodes() == ()
        assert seen.gone == [("llm-a", "its pod on n1 was deleted")]


# -- a job that has too few nodes --------------------------------------------------------------
SHORT_HOLD = PodTiming(gang_hold_s=0.2)


@pytest.mark.parametrize("known", ["reported", "labelled", "new"])
async def test_trained_nodes_are_kept_while_their_replacement_is_unschedulable(known: str) -> None:
    """Reported to this operator or labelled by an earlier one; new nodes are released."""
    survivors = {"llm-a": 0, "llm-b": 1, "llm-c": 3}
    listed = [pod(name, f"n{rank}") for name, rank in survivors.items()]
    if known == "labelled":
        for one in listed:
            one["metadata"]["labels"][names.LABEL_RANK] = "0"
    api = FakeApi(listed=[*listed, unschedulable("llm-d")])
    nodes = {"min": 4, "max": 4}
    async with opened(api, nodes, SHORT_HOLD, startTimeoutSeconds=0.5) as seen:
        if known == "reported":
            seen.backend.label(1, survivors)
        await eventually(lambda: bool(seen.gone), "what did not start to be released")
        kept = {*survivors} - {name for name, _why in seen.gone}
        assert kept == (set() if known == "new" else {*survivors})
        assert "llm-d" in dict(seen.gone)


async def test_a_job_with_a_new_smaller_minimum_keeps_its_nodes() -> None:
    kubernetes = {"startTimeoutSeconds": 0.5}
    listed = [
        pod("llm-a", "n1"),
        pod("llm-b", "n2"),
        unschedulable("llm-c"),
        unschedulable("llm-d"),
    ]
    nodes = {"min": 4, "max": 4}
    async with opened(FakeApi(listed=listed), nodes, SHORT_HOLD, **kubernetes) as seen:
        await seen.backend.follow(training_job({"min": 2, "max": 4}, kubernetes=kubernetes))
        await eventually(lambda: bool(seen.gone), "what did not start to be released")
        assert {name for name, _why in seen.gone} == {"llm-c", "llm-d"}


async def test_a_job_with_a_new_larger_minimum_releases_too_few_nodes_at_once() -> None:
    """The release does not wait for a change of a pod."""
    api = FakeApi(listed=[pod("llm-a", "n1"), unschedulable("llm-b")])
    async with opened(api, {"min": 1, "max": 2}, PodTiming(gang_hold_s=0.0)) as seen:
        await seen.backend.follow(training_job({"min": 2, "max": 2}))
        assert {name for name, _why in seen.gone} == {"llm-a", "llm-b"}


# -- autoscalers ---------------------------------------------------------------------------------
def event(reason: str, pod_name: str) -> Document:
    return {
        "metadata": {"name": f"{pod_name}.1"},
        "reason": reason,
        "involvedObject": {"kind": "Pod", "name": pod_name},
    }


@pytest.mark.parametrize("reason", ["TriggeredScaleUp", "Nominated"])
async def test_nodes_are_kept_while_an_autoscaler_adds_a_machine(reason: str) -> None:
    api = FakeApi(listed=[pod("llm-a", "n1"), unschedulable("llm-b")])
    events = {"metadata": {}, "items": [event(reason, "llm-b")]}
    api.objects["/api/v1/namespaces/research/events"] = events
    timing = PodTiming(provisioning_check_s=0.01)
    async with opened(api, {"min": 2, "max": 2}, timing) as seen:
        await eventually(lambda: seen.backend._provisioned == {"llm-b"}, "the Event to be read")
        seen.backend._startup._timing = replace(timing, gang_hold_s=0.0)
        seen.backend._check_startup()
        assert seen.gone == []
        events["items"] = []
        await eventually(lambda: len(seen.gone) == 2, "the end of the hold time")


async def test_a_job_that_was_suspended_gets_pods_of_its_new_template() -> None:
    api = FakeApi()
    async with opened(api, {"min": 1, "max": 2}) as seen:
        where = {"podTemplate": {"spec": {"nodeSelector": {"pool": "b"}}}, "gang": "kueue"}
        changed = training_job({"min": 1, "max": 2}, kubernetes=where, queue="q")
        await seen.backend.follow(changed)
        assert seen.backend.queue.is_held({
            "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
            "metadata": {},
        })  # fmt: skip
        await seen.backend.follow(training_job({"min": 1, "max": 2}, kubernetes={
            "podTemplate": {"spec": {"nodeSelector": {"pool": "b"}}}}))  # fmt: skip
        (node,) = await seen.backend.request_nodes(1, ())
        assert api.made[node]["spec"]["nodeSelector"] == {"pool": "b"}
