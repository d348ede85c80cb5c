"""What a job's backend makes of pods and nodes as an API server shows them: where a node is, and
that it is about to be taken away.

Owns: these tests, against a small HTTP server; the contract of all backends is in tests/contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.kubernetes import TOPOLOGY_KEYS
from holdfast.orchestrator.backends.kubernetes import startup_timeouts
from holdfast.orchestrator.backends.kubernetes.backend import KubernetesBackend, OperatorContext
from holdfast.orchestrator.backends.kubernetes.gang_arbiter import GangArbiter
from holdfast.orchestrator.backends.kubernetes.node_informer import NodeInformer
from holdfast.orchestrator.backends.kubernetes.pod_informer import PodInformer
from holdfast.orchestrator.core.rank_assignment import order_newcomers
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.protocol.facts import NodeFacts
from tests.unit.api.wrong_jobs import job, script
from tests.unit.backends.kubernetes.queue_fixtures import OWNER, SETTINGS
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually

Document = dict[str, Any]
FACTS = NodeFacts(hostname="h", address="10.0.0.1", data_port=1, slots=8)


def pod(name: str, place: str, version: int = 1, **status: Any) -> Document:
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
        "spec": {"nodeName": place},
        "status": {"phase": "Running", "containerStatuses": [state], **status},
    }


def unplaced(name: str) -> Document:
    """No Kubernetes node has room for it."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return pod(name, "", phase="Pending", containerStatuses=[], conditions=[condition])


def kubernetes_node(name: str, **labels: str) -> Document:
    return {"metadata": {"name": name, "labels": labels}}


def wish(nodes: dict[str, int], **spec: Any) -> TrainingJob:
    """The job as its object has it now."""
    return job_from_mapping(job(script(nodes=nodes, **spec), OWNER.name))


class Seen:
    """A backend that is open, and what it told."""

    def __init__(self, backend: KubernetesBackend, places: NodeInformer) -> None:
        self.backend, self.places = backend, places
        self.notices: list[tuple[str, str]] = []
        self.gone: list[tuple[str, str]] = []


@asynccontextmanager
async def opened(
    api: FakeApi, nodes: dict[str, int] | None = None, **kubernetes: Any
) -> AsyncIterator[Seen]:
    wanted = wish(nodes or {"max": 1}, kubernetes=kubernetes)
    async with cluster_of(api) as cluster:
        feed, places = PodInformer(cluster), NodeInformer(cluster)
        seen: Seen
        backend = KubernetesBackend(
            wanted,
            OWNER,
            OperatorContext(cluster, feed, places, GangArbiter(), SETTINGS),
            on_notice=lambda node, detail: seen.notices.append((node, detail)),
        )
        seen = Seen(backend, places)
        feeding = asyncio.create_task(feed.run())
        try:
            await backend.open(lambda one: seen.gone.append((one.node, one.detail)))
            yield seen
        finally:
            await backend.close(release=False)
            feeding.cancel()
            await asyncio.wait([feeding])


# -- where a node is ---------------------------------------------------------------------------
def racked(keys: tuple[str, ...], *values: str) -> dict[str, str]:
    return {key: value for key, value in zip(keys, values, strict=True) if value}


@pytest.mark.parametrize(
    ("kubernetes", "keys"),
    [({}, TOPOLOGY_KEYS), ({"topologyKeys": ["example.com/hall", "example.com/row"]}, None)],
    ids=["default-keys", "keys-of-the-spec"],
)
def test_a_node_is_where_the_labels_of_its_kubernetes_node_say(
    kubernetes: dict[str, Any], keys: tuple[str, ...] | None
) -> None:
    keys = keys or tuple(kubernetes["topologyKeys"])
    values = [f"value-{number}" for number in range(len(keys))]

    async def story() -> None:
        api = FakeApi(listed=[pod("llm-a", "n1")])
        api.objects["/api/v1/nodes/n1"] = kubernetes_node("n1", **racked(keys, *values))
        async with opened(api, **kubernetes) as seen:
            await eventually(lambda: bool(seen.places.labels("n1")), "the labels")
            facts = seen.backend.facts_of("llm-a", FACTS)
            assert facts.topology == (*values, "n1") and facts.failure_domain == "n1"
            assert seen.backend.facts_of("llm-unknown", FACTS) == FACTS

    asyncio.run(story())


def test_ranks_of_one_clique_are_neighbours_whatever_the_names_of_their_nodes() -> None:
    """Zone, block, rack and clique, outermost first: a clique is never torn apart."""
    layout = {  # pod, Kubernetes node -> (zone, block, rack, clique)
        "llm-a": ("n1", ("z1", "b1", "r2", "c3")),
        "llm-b": ("n2", ("z1", "b1", "r1", "c2")),
        "llm-c": ("n3", ("z1", "b1", "r2", "c4")),
        "llm-d": ("n4", ("z1", "b1", "r1", "c1")),
        "llm-e": ("n5", ("z1", "b1", "r2", "c3")),
        "llm-f": ("n6", ("z0", "b9", "r9", "c9")),
        "llm-g": ("n7", ("z1", "b1", "r1", "c2")),
    }

    async def story() -> None:
        api = FakeApi(listed=[pod(name, place) for name, (place, _values) in layout.items()])
        for place, values in layout.values():
            labels = racked(TOPOLOGY_KEYS, *values)
            api.objects[f"/api/v1/nodes/{place}"] = kubernetes_node(place, **labels)
        async with opened(api) as seen:
            known = seen.places.labels
            await eventually(lambda: all(known(p) for p, _ in layout.values()), "all labels")
            facts_of = seen.backend.facts_of
            nodes = [(name, facts_of(name, FACTS), joined) for joined, name in enumerate(layout)]
            assert order_newcomers(nodes) == (
                "llm-f", "llm-d", "llm-b", "llm-g", "llm-a", "llm-e", "llm-c",
            )  # fmt: skip

    asyncio.run(story())


# -- a node that is taken away -----------------------------------------------------------------
def disrupted(reason: str, message: str = "") -> list[Document]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return [condition | ({"message": message} if message else {})]


@pytest.mark.parametrize(
    ("reason", "message", "told"),
    [
        (
            "PreemptionByScheduler",
            "default-scheduler: preempting to accommodate a higher priority pod",
            "preempted by a pod of higher priority: default-scheduler: preempting to accommodate "
            "a higher priority pod",
        ),
        ("DeletionByTaintManager", "", "its Kubernetes node was tainted NoExecute"),
        ("EvictionByEvictionAPI", "", "evicted, by a drain for example"),
        ("SomethingNew", "", "it is taken away (SomethingNew)"),
    ],
)
def test_a_disruption_is_told_while_the_pod_still_runs_and_only_once(
    reason: str, message: str, told: str
) -> None:
    async def story() -> None:
        api = FakeApi(listed=[pod("llm-a", "n1"), pod("llm-b", "n2")])
        async with opened(api) as seen:
            watch = await api.next_watch()
            conditions = disrupted(reason, message)
            watch.tell("MODIFIED", pod("llm-a", "n1", 2, conditions=conditions))
            await eventually(lambda: bool(seen.notices), "the notice")
            leaving = pod("llm-a", "n1", 3, conditions=conditions)
            leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            watch.tell("MODIFIED", leaving)
            watch.tell("DELETED", leaving)
            await eventually(lambda: bool(seen.gone), "the end")
            assert seen.notices == [("llm-a", told)]
            assert seen.gone == [("llm-a", f"its pod on n1 is gone: {told}")]

    asyncio.run(story())


def test_a_pod_that_somebody_deletes_is_told_while_it_still_runs() -> None:
    async def story() -> None:
        api = FakeApi(listed=[pod("llm-a", "n1")])
        async with opened(api) as seen:
            watch = await api.next_watch()
            leaving = pod("llm-a", "n1", 2)
            leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            watch.tell("MODIFIED", leaving)
            await eventually(lambda: bool(seen.notices), "the notice")
            assert seen.notices == [("llm-a", "its pod is being deleted")] and seen.gone == []

    asyncio.run(story())


def test_pods_of_an_earlier_job_of_the_same_name_are_none_of_its_own() -> None:
    async def story() -> None:
        other = pod("llm-old", "n1")
        other["metadata"]["ownerReferences"][0]["uid"] = "another"
        api = FakeApi(listed=[other, pod("llm-a", "n1")])
        async with opened(api) as seen:
            watch = await api.next_watch()
            watch.tell("DELETED", other)
            watch.tell("DELETED", pod("llm-a", "n1", 2))
            await eventually(lambda: bool(seen.gone), "the end")
            assert await seen.backend.list_nodes() == ()
            assert seen.gone == [("llm-a", "its pod on n1 was deleted")]

    asyncio.run(story())


# -- a job that has not enough nodes -----------------------------------------------------------
@pytest.mark.parametrize("known", ["told", "labelled", "new"])
def test_nodes_that_have_trained_are_kept_while_a_replacement_finds_no_room(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this operator or an earlier one; those of a start, half a gang, are given back."""
    survivors = {"llm-a": 0, "llm-b": 1, "llm-c": 3}
    listed = [pod(name, f"n{rank}") for name, rank in survivors.items()]
    if known == "labelled":
        for one in listed:
            one["metadata"]["labels"][names.LABEL_RANK] = "0"

    async def story() -> None:
        api = FakeApi(listed=[*listed, unplaced("llm-d")])
        nodes = {"min": 4, "max": 4}
        async with opened(api, nodes, startTimeoutSeconds=0.5) as seen:
            if known == "told":
                seen.backend.label(1, survivors)
            monkeypatch.setattr(startup_timeouts, "HOLD_S", 0.0)
            await eventually(lambda: bool(seen.gone), "what did not start to be given back")
            kept = {*survivors} - {name for name, _why in seen.gone}
            assert kept == (set() if known == "new" else {*survivors})
            assert "llm-d" in dict(seen.gone)

    asyncio.run(story())


def test_a_job_that_needs_fewer_nodes_from_now_on_keeps_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubernetes = {"startTimeoutSeconds": 0.5}

    async def story() -> None:
        listed = [pod("llm-a", "n1"), pod("llm-b", "n2"), unplaced("llm-c"), unplaced("llm-d")]
        async with opened(FakeApi(listed=listed), {"min": 4, "max": 4}, **kubernetes) as seen:
            monkeypatch.setattr(startup_timeouts, "HOLD_S", 0.0)
            await seen.backend.follow(wish({"min": 2, "max": 4}, kubernetes=kubernetes))
            await eventually(lambda: bool(seen.gone), "what did not start to be given back")
            assert {name for name, _why in seen.gone} == {"llm-c", "llm-d"}

    asyncio.run(story())


def test_a_job_that_needs_more_nodes_from_now_on_gives_half_of_them_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only when something happens to one of its pods."""
    monkeypatch.setattr(startup_timeouts, "HOLD_S", 0.0)

    async def story() -> None:
        api = FakeApi(listed=[pod("llm-a", "n1"), unplaced("llm-b")])
        async with opened(api, {"min": 1, "max": 2}) as seen:
            await seen.backend.follow(wish({"min": 2, "max": 2}))
            assert {name for name, _why in seen.gone} == {"llm-a", "llm-b"}

    asyncio.run(story())
