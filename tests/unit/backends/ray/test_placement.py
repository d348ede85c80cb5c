"""A job's placement groups: one request, gangs whole or not at all, no excluded Ray node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, load_job
from holdfast.orchestrator.api.v1alpha1.effects import without_effect
from holdfast.orchestrator.backends.ray import placement, ray_nodes
from holdfast.orchestrator.backends.ray.placement import (
    Bundle,
    GangPlacement,
    PlacementGroupHandle,
    PlacementTiming,
    RayGroups,
    bundle_of,
)
from holdfast.orchestrator.backends.ray.ray_nodes import fits
from holdfast.orchestrator.errors import HoldfastError
from tests.documents import job_document

from .fake_cluster import FakeCluster

ROOT = Path(__file__).resolve().parents[4]
BOUND_S = 30.0
UNBOUNDED = PlacementTiming(place_s=1e6)
"""A wait for a group without room would never end."""


class JobNodes:
    """Uses a GangPlacement as a backend does: it starts a node in every bundle that it gets."""

    def __init__(
        self,
        cluster: FakeCluster,
        gang: int,
        job: str = "job",
        timing: PlacementTiming | None = None,
        placement: type[GangPlacement] = GangPlacement,
    ) -> None:
        self._placed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self.placement = placement(
            cluster.of(job), gang, self._next_name, self._spawn, self._placed.set, timing
        )

    async def serve(
        self, missing: int, *, excluded: frozenset[str] = frozenset(), wait: bool = True
    ) -> list[str]:
        """Ray nodes of the nodes that were started."""
        started: list[Bundle] = await self.placement.serve(missing, excluded, wait=wait)
        for group, bundle in started:
            group.nodes[bundle] = f"node {bundle} of {group.name}"
        return [group.ray_nodes[bundle] for group, bundle in started]

    async def until_placed(self) -> None:
        await self._placed.wait()
        self._placed.clear()

    def on(self, ray_node: str) -> tuple[Any, int]:
        return next(
            (group, bundle)
            for group in self.placement.groups.values()
            for bundle, place in group.ray_nodes.items()
            if place == ray_node
        )

    async def ended(self, ray_node: str) -> None:
        """The node there ends, and the backend notices."""
        group, bundle = self.on(ray_node)
        del group.nodes[bundle]
        if not group.nodes:
            await self.placement.remove(group)

    def requested(self) -> list[int]:
        """Sizes of the groups without nodes."""
        return [g.size for g in self.placement.groups.values() if not g.nodes]

    def _next_name(self) -> str:
        self._number += 1
        return f"node-{self._number - 1}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def test_all_wanted_nodes_are_requested_at_once_of_an_empty_cluster_without_a_wait() -> None:
    job = JobNodes(FakeCluster(), gang=2, timing=UNBOUNDED)
    assert await job.serve(5) == []
    assert job.requested() == [2, 1, 1, 1]


async def test_nodes_with_room_start_without_a_wait_for_those_without() -> None:
    job = JobNodes(FakeCluster(a=1, b=1, c=1), gang=2, timing=UNBOUNDED)
    assert sorted(await job.serve(5)) == ["a", "b", "c"]
    assert job.requested() == [1, 1]


async def test_any_number_of_nodes_on_busy_ray_nodes_is_waited_for_once() -> None:
    waits: list[int] = []

    class CountingPlacement(GangPlacement):
        async def _until_placed_or_full(self, made: Any) -> bool:
            waits.append(len(made))
            return await super()._until_placed_or_full(made)

    cluster = FakeCluster(a=1, b=1, c=1)
    short = PlacementTiming(place_s=0.05)
    other = JobNodes(cluster, 1, "other", short, CountingPlacement)
    assert len(await other.serve(3)) == 3
    waits.clear()
    job = JobNodes(cluster, 1, timing=short, placement=CountingPlacement)
    assert await job.serve(3) == []
    assert waits == [3]


async def test_a_further_node_never_starts_before_the_gang_and_takes_no_room_from_it() -> None:
    cluster = FakeCluster(a=1)
    job = JobNodes(cluster, gang=2)
    assert await job.serve(3) == []
    assert cluster.room("a") == 1 and job.requested() == [2]
    cluster.add("b")
    await job.until_placed()
    assert sorted(await job.serve(3, wait=False)) == ["a", "b"]
    cluster.add("c")
    await job.until_placed()
    assert await job.serve(1, wait=False) == ["c"]


async def test_two_jobs_never_hold_half_of_the_room_that_each_needs() -> None:
    cluster = FakeCluster()
    jobs = [JobNodes(cluster, 2, name) for name in ("one", "two")]
    for job in jobs:
        assert await job.serve(3) == []
    cluster.add("a")  # a further node of the first
    cluster.add("b")  # and of the second
    for job in jobs:
        await job.until_placed()
        assert await job.serve(3, wait=False) in ([], ["a", "b"], ["b", "a"])
    running = [job for job in jobs if any(g.nodes for g in job.placement.groups.values())]
    if not running:
        await asyncio.wait(
            [asyncio.create_task(job.until_placed()) for job in jobs],
            return_when=asyncio.FIRST_COMPLETED,
        )
        running = [job for job in jobs if await job.serve(3, wait=False)]
    assert len(running) == 1


async def test_nodes_that_are_requested_together_are_on_different_ray_nodes() -> None:
    cluster = FakeCluster(a=8, b=8, c=8, d=8)
    job = JobNodes(cluster, gang=2)
    assert sorted(await job.serve(4)) == ["a", "b", "c", "d"]
    assert job.requested() == []


async def test_a_gang_bundle_of_a_lost_ray_node_is_used_where_ray_moves_it() -> None:
    cluster = FakeCluster(a=1, b=1)
    job = JobNodes(cluster, gang=2, timing=PlacementTiming(recheck_s=0.01))
    assert len(await job.serve(2)) == 2
    cluster.silent.add("b")  # the head still lists it
    await job.ended("b")
    assert await job.serve(1) == []
    assert job.requested() == [], "its bundle is the request"
    for _ in range(3):  # checked again and again
        await job.until_placed()
        assert await job.serve(1, wait=False) == []
    cluster.lose("b")
    cluster.add("c")
    while not (started := await job.serve(1, wait=False)):
        await job.until_placed()
    assert started == ["c"]


async def test_a_replacement_avoids_a_lost_ray_node_that_the_head_still_lists() -> None:
    cluster = FakeCluster(a=1)
    job = JobNodes(cluster, gang=1)
    assert await job.serve(1) == ["a"]
    cluster.add("b")
    cluster.silent.add("a")
    job.placement.dead.add("a")
    await job.ended("a")
    assert await job.serve(1) == ["b"]


async def test_a_ray_node_that_was_wrongly_dead_is_used_again() -> None:
    cluster = FakeCluster(a=1)
    cluster.num_probe_failures = 1
    job = JobNodes(cluster, gang=1)
    job.placement.dead.add("a")
    assert await job.serve(1) == []  # the head does not answer
    while not (started := await job.serve(1)):
        await job.until_placed()
    assert started == ["a"] and job.placement.dead == set()


async def test_placement_does_not_wait_for_the_probe_of_a_lost_ray_node() -> None:
    cluster = FakeCluster(a=1, b=1)
    cluster.silent.add("b")
    cluster.slow["b"] = asyncio.Event()
    job = JobNodes(cluster, gang=1)
    job.placement.dead.add("b")
    for _ in range(2):
        assert await job.serve(1) == ["a"]
        await job.ended("a")
    assert cluster.num_probes == 1, "one probe at a time"
    cluster.silent.clear()
    cluster.slow["b"].set()
    while job.placement.dead:
        await job.until_placed()


async def test_a_group_whose_last_node_ends_during_a_probe_is_not_used() -> None:
    cluster = FakeCluster(a=1, b=1)
    job = JobNodes(cluster, gang=2)
    assert sorted(await job.serve(2)) == ["a", "b"]
    group, bundle = job.on("b")
    del group.nodes[bundle]  # free again, and its Ray node is probed first
    cluster.slow["b"] = asyncio.Event()
    serving = asyncio.ensure_future(job.serve(1, wait=False))
    while not cluster.num_probes:
        await asyncio.sleep(0)
    await job.ended("a")
    cluster.slow["b"].set()
    assert await serving == [] and group.removed


async def test_a_loss_that_the_head_has_noticed_keeps_pending_groups() -> None:
    cluster = FakeCluster(a=1, b=1)
    job = JobNodes(cluster, gang=1)
    cluster.silent.add("b")
    job.placement.dead.add("b")
    assert await job.serve(2) == ["a"]
    (pending,) = [group for group in job.placement.groups.values() if not group.nodes]
    assert "b" in pending.avoided and job.placement.dead == {"b"}
    cluster.lose("b")
    assert await job.serve(1, wait=False) == []
    assert job.placement.dead == set()
    assert pending in job.placement.groups.values()


async def test_a_ray_node_that_pending_groups_avoid_is_used_once_it_is_free() -> None:
    cluster = FakeCluster(a=1, b=1)
    job = JobNodes(cluster, gang=1)
    assert len(await job.serve(2)) == 2
    assert await job.serve(1) == []
    assert job.requested() == [1]
    await job.ended("b")
    assert await job.serve(1) == ["b"]
    assert job.requested() == []


async def test_nodes_that_are_no_longer_wanted_are_no_longer_requested() -> None:
    cluster = FakeCluster()
    job = JobNodes(cluster, gang=2)
    assert await job.serve(5) == []
    assert await job.serve(3, wait=False) == []
    assert job.requested() == [2, 1]
    assert await job.serve(0, wait=False) == []
    assert job.requested() == [] and cluster.groups == {}


async def test_an_excluded_ray_node_is_not_used_again_though_the_gang_keeps_its_bundle_there() -> (
    None
):
    cluster = FakeCluster(a=1, b=1, c=1)
    job = JobNodes(cluster, gang=2)
    bad, _good = await job.serve(2)
    await job.ended(bad)
    assert await job.serve(1, excluded=frozenset({bad})) == ["c"]


async def test_a_group_is_removed_once_the_head_answers_again() -> None:
    cluster = FakeCluster(a=1)
    job = JobNodes(cluster, gang=1, timing=PlacementTiming(head_pause_s=0.01))
    assert await job.serve(1) == ["a"]
    cluster.num_failures = 3
    await job.ended("a")
    assert job.placement.groups == {}
    while cluster.groups:
        await asyncio.sleep(0.01)


async def test_groups_of_an_earlier_controller_are_kept_if_they_have_nodes() -> None:
    cluster = FakeCluster(a=1, b=1)
    before = JobNodes(cluster, gang=2)
    assert len(await before.serve(3)) == 2
    (name,) = [name for name, group in before.placement.groups.items() if group.nodes]
    after = JobNodes(cluster, gang=2)
    await after.placement.adopt({name: 2}, {"x": (name, 0), "y": (name, 1)})
    assert list(cluster.groups) == [name]
    assert after.placement.groups[name].nodes == {0: "x", 1: "y"}


# -- Ray's own groups --------------------------------------------------------------------------
class PendingHandle:
    """A placement group without a place, as Ray's handle of it blocks."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self.placed = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.waited_for.set()
        return self.placed.wait(timeout_s)


async def test_pending_groups_take_none_of_the_shared_threads() -> None:
    handles = [PendingHandle() for _ in range(40)]  # more than the threads that asyncio shares
    groups = RayGroups("job", {"CPU": 1.0})
    waiting = [
        asyncio.create_task(groups.wait(PlacementGroupHandle(f"job/node-{number}", 1, handle)))
        for number, handle in enumerate(handles)
    ]
    try:
        while not all(handle.waited_for.is_set() for handle in handles):
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(lambda: "at once") == "at once"
        assert not any(task.done() for task in waiting)
    finally:
        for handle in handles:
            handle.placed.set()
    await asyncio.gather(*waiting)


async def test_a_wait_that_the_head_breaks_off_goes_on() -> None:
    class FailingHandle(PendingHandle):
        failures = 2

        def wait(self, timeout_s: float) -> bool:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("the head does not answer")
            return True

    groups = RayGroups("job", {"CPU": 1.0}, pause_s=0.01)
    await groups.wait(PlacementGroupHandle("job/node-0", 1, FailingHandle()))


def test_a_bundle_has_the_resources_of_all_workers_of_a_node() -> None:
    document = job_document(
        "bundle",
        {
            "entrypoint": {"script": "train.py"},
            "workersPerNode": 8,
            "resources": {"cpu": "500m", "gpu": 1, "memory": "4Gi"},
        },
    )
    bundle = bundle_of(job_from_mapping(document))
    assert bundle == {"CPU": 4.0, "GPU": 8.0, "memory": 32.0 * 2**30}
    assert fits(bundle, {"CPU": 16.0, "GPU": 8.0, "memory": 64.0 * 2**30})
    assert not fits(bundle, {"CPU": 16.0, "GPU": 4.0, "memory": 64.0 * 2**30})


def test_a_job_without_resources_takes_a_core_per_worker() -> None:
    assert bundle_of(load_job(ROOT / "examples" / "stdlib-bytes.yaml")) == {"CPU": 2.0}


# -- which Ray nodes ---------------------------------------------------------------------------
def placed_job(resources: dict[str, Any] | None = None, **ray: Any) -> TrainingJob:
    return job_from_mapping(
        job_document(
            "job",
            {
                "entrypoint": {"script": "train.py"},
                "workersPerNode": 2,
                "resources": {"gpu": 1} if resources is None else resources,
                "ray": ray,
            },
        )
    )


def test_a_bundle_has_the_accelerator_type_and_custom_resources() -> None:
    job = placed_job(acceleratorType="H100", customResources={"efa": 4})
    expected = {"CPU": 2.0, "GPU": 2.0, "accelerator_type:H100": 0.001, "efa": 4.0}
    assert placement.bundle_of(job) == expected


def test_groups_select_labels_and_still_avoid_ray_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    group_module = pytest.importorskip("ray.util.placement_group")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(group_module, "placement_group", lambda _bundles, **how: made.append(how))
    groups = RayGroups("job", {"CPU": 1.0}, {"zone": "!in(a,b)"})
    groups.make("node-0", 2, frozenset())
    groups.make("node-2", 1, frozenset({"x"}))
    assert made[0]["bundle_label_selector"] == [{"zone": "!in(a,b)"}] * 2
    both = {"zone": "!in(a,b)", "ray.io/node-id": "!in(x)"}
    assert made[1]["bundle_label_selector"] == [both]


@pytest.mark.parametrize(
    ("wanted", "yes"),
    [("a", True), ("b", False), ("!a", False), ("!b", True), ("in(a,b)", True), ("in(b,c)", False),
     ("!in(a,b)", False), ("!in(b,c)", True)],
)  # fmt: skip
def test_a_ray_node_is_suitable_as_its_labels_say(wanted: str, yes: bool) -> None:
    one = {"Resources": {"CPU": 4.0}, "Labels": {"zone": "a"}}
    assert ray_nodes.suits({"CPU": 1.0}, {"zone": wanted}, one) is yes
    assert not ray_nodes.suits({"CPU": 8.0}, {"zone": wanted}, one)
    unlabelled = {"Resources": {"CPU": 4.0}, "Labels": {}}
    assert ray_nodes.suits({"CPU": 1.0}, {"zone": wanted}, unlabelled) is wanted.startswith("!")


@pytest.mark.parametrize(
    ("ray", "problem"),
    [
        ({"customResources": {"GPU": 1}}, "customResources.GPU: got a resource of Ray's own"),
        ({"customResources": {"node:1.2.3.4": 1}}, "got a resource of Ray's own"),
        ({"labelSelector": {"ray.io/node-id": "x"}}, "labelSelector: got ray.io/node-id"),
        ({"labelSelector": {"zone": "in(a"}}, "labelSelector.zone: got 'in(a'"),
        ({"labelSelector": {"zone": ""}}, "expected value, !value, in(a,b) or !in(a,b)"),
    ],
)
def test_what_ray_itself_decides_or_cannot_read_is_refused(
    ray: dict[str, Any], problem: str
) -> None:
    with pytest.raises(HoldfastError) as raised:
        placed_job(**ray)
    assert problem in str(raised.value)


def test_an_accelerator_type_without_gpus_is_refused() -> None:
    (problem,) = without_effect(placed_job({"gpu": 0}, acceleratorType="H100"))
    assert str(problem).startswith("spec.ray.acceleratorType: got H100 for a job on CPUs")
