"""Which placement groups a job has: all that is wanted is demanded at once, a gang is whole or not
there, and no node is put where it should not be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import placement, retry
from holdfast.orchestrator.backends.ray.placement import Bundle, GangPlacement

from .fake_cluster import FakeCluster

BOUND_S = 30.0


class Waiter:
    """What a backend does with rooms: it starts a node in every bundle that it gets."""

    def __init__(self, cluster: FakeCluster, gang: int, job: str = "job") -> None:
        self.room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0
        self.rooms = GangPlacement(
            cluster.of(job), gang, self._next_name, self._spawn, self.room.set
        )

    async def serve(
        self, missing: int, *, barred: frozenset[str] = frozenset(), wait: bool = True
    ) -> list[str]:
        """Ray nodes of the nodes that were started."""
        started: list[Bundle] = await self.rooms.serve(missing, barred, wait=wait)
        for group, bundle in started:
            group.taken[bundle] = f"node {bundle} of {group.name}"
        return [group.places[bundle] for group, bundle in started]

    async def room_came(self) -> None:
        await self.room.wait()
        self.room.clear()

    def on(self, ray_node: str) -> tuple[Any, int]:
        return next(
            (group, bundle)
            for group in self.rooms.groups.values()
            for bundle, place in group.places.items()
            if place == ray_node
        )

    async def ended(self, ray_node: str) -> None:
        """The node there ends, as the backend takes note of it."""
        group, bundle = self.on(ray_node)
        del group.taken[bundle]
        if not group.taken:
            await self.rooms.remove(group)

    def demand(self) -> list[int]:
        """Sizes of the groups that wait for a place."""
        return [g.size for g in self.rooms.groups.values() if not g.taken]

    def _next_name(self) -> str:
        self._number += 1
        return f"node-{self._number - 1}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await scenario()

    asyncio.run(bounded())


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """New groups get all the time in the world: what cannot be placed must not be waited for."""
    monkeypatch.setattr(placement, "PLACE_S", 1e6)


@pytest.mark.usefixtures("endless")
def test_an_empty_cluster_is_asked_for_all_that_is_wanted_at_once_and_not_waited_for() -> None:
    async def scenario() -> None:
        job = Waiter(FakeCluster(), gang=2)
        assert await job.serve(5) == []
        assert job.demand() == [2, 1, 1, 1]

    play(scenario)


@pytest.mark.usefixtures("endless")
def test_what_has_room_starts_without_a_wait_for_what_has_none() -> None:
    async def scenario() -> None:
        job = Waiter(FakeCluster(a=1, b=1, c=1), gang=2)
        assert sorted(await job.serve(5)) == ["a", "b", "c"]
        assert job.demand() == [1, 1]

    play(scenario)


def test_what_is_on_busy_ray_nodes_is_waited_for_once_however_much_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []

    class Counted(GangPlacement):
        async def _settle(self, made: Any) -> bool:
            waits.append(len(made))
            return await super()._settle(made)

    monkeypatch.setattr(placement, "PLACE_S", 0.05)
    monkeypatch.setattr(f"{__name__}.GangPlacement", Counted)

    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1, c=1)
        other = Waiter(cluster, 1, "other")
        assert len(await other.serve(3)) == 3
        waits.clear()
        job = Waiter(cluster, 1)
        assert await job.serve(3) == []
        assert waits == [3]

    play(scenario)


def test_a_further_node_never_starts_before_the_gang_and_holds_no_room_for_it() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1)
        job = Waiter(cluster, gang=2)
        assert await job.serve(3) == []
        assert cluster.room("a") == 1 and job.demand() == [2]
        cluster.add("b")
        await job.room_came()
        assert sorted(await job.serve(3, wait=False)) == ["a", "b"]
        cluster.add("c")
        await job.room_came()
        assert await job.serve(1, wait=False) == ["c"]

    play(scenario)


def test_two_jobs_never_hold_half_of_what_each_needs() -> None:
    async def scenario() -> None:
        cluster = FakeCluster()
        jobs = [Waiter(cluster, 2, name) for name in ("one", "two")]
        for job in jobs:
            assert await job.serve(3) == []
        cluster.add("a")  # a further node of the first
        cluster.add("b")  # and of the second
        for job in jobs:
            await job.room_came()
            assert await job.serve(3, wait=False) in ([], ["a", "b"], ["b", "a"])
        running = [job for job in jobs if any(g.taken for g in job.rooms.groups.values())]
        if not running:
            await asyncio.wait(
                [asyncio.create_task(job.room_came()) for job in jobs],
                return_when=asyncio.FIRST_COMPLETED,
            )
            running = [job for job in jobs if await job.serve(3, wait=False)]
        assert len(running) == 1

    play(scenario)


def test_nodes_that_are_asked_for_together_are_on_ray_nodes_of_their_own() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=8, b=8, c=8, d=8)
        job = Waiter(cluster, gang=2)
        assert sorted(await job.serve(4)) == ["a", "b", "c", "d"]
        assert job.demand() == []

    play(scenario)


def test_a_bundle_of_the_gang_whose_ray_node_is_lost_is_used_where_ray_puts_it_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "AGAIN_S", 0.01)

    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        job = Waiter(cluster, gang=2)
        assert len(await job.serve(2)) == 2
        cluster.silent.add("b")  # the head does not know it yet
        await job.ended("b")
        assert await job.serve(1) == []
        assert job.demand() == [], "its bundle is the demand"
        for _ in range(3):  # looked at again, more than once
            await job.room_came()
            assert await job.serve(1, wait=False) == []
        cluster.lose("b")
        cluster.add("c")
        while not (started := await job.serve(1, wait=False)):
            await job.room_came()
        assert started == ["c"]

    play(scenario)


def test_a_replacement_is_not_sought_where_the_head_has_not_noticed_the_loss_yet() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1)
        job = Waiter(cluster, gang=1)
        assert await job.serve(1) == ["a"]
        cluster.add("b")
        cluster.silent.add("a")
        job.rooms.dead.add("a")
        await job.ended("a")
        assert await job.serve(1) == ["b"]

    play(scenario)


def test_a_ray_node_that_was_taken_for_dead_by_mistake_is_used_again() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1)
        cluster.fails_to_answer = 1
        job = Waiter(cluster, gang=1)
        job.rooms.dead.add("a")
        assert await job.serve(1) == []  # the head does not say who answers
        while not (started := await job.serve(1)):
            await job.room_came()
        assert started == ["a"] and job.rooms.dead == set()

    play(scenario)


def test_nobody_waits_for_an_answer_of_a_ray_node_that_is_gone() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        cluster.silent.add("b")
        cluster.slow["b"] = asyncio.Event()
        job = Waiter(cluster, gang=1)
        job.rooms.dead.add("b")
        for _ in range(2):
            assert await job.serve(1) == ["a"]
            await job.ended("a")
        assert cluster.num_asked == 1, "asked again while it is asked"
        cluster.silent.clear()
        cluster.slow["b"].set()
        while job.rooms.dead:
            await job.room_came()  # told, so that what waits can be served

    play(scenario)


def test_a_group_whose_last_node_ends_while_it_is_looked_at_is_not_used() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        job = Waiter(cluster, gang=2)
        assert sorted(await job.serve(2)) == ["a", "b"]
        group, bundle = job.on("b")
        del group.taken[bundle]  # free again, and on a Ray node that is looked at first
        cluster.slow["b"] = asyncio.Event()
        serving = asyncio.ensure_future(job.serve(1, wait=False))
        while not cluster.num_asked:
            await asyncio.sleep(0)
        await job.ended("a")
        cluster.slow["b"].set()
        assert await serving == [] and group.over

    play(scenario)


def test_a_loss_that_the_head_has_noticed_is_forgotten_and_no_waiting_group_made_anew() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        job = Waiter(cluster, gang=1)
        cluster.silent.add("b")
        job.rooms.dead.add("b")
        assert await job.serve(2) == ["a"]
        (waiting,) = [group for group in job.rooms.groups.values() if not group.taken]
        assert "b" in waiting.shun and job.rooms.dead == {"b"}
        cluster.lose("b")
        assert await job.serve(1, wait=False) == []
        assert job.rooms.dead == set()
        assert waiting in job.rooms.groups.values()

    play(scenario)


def test_a_ray_node_that_waiting_groups_were_told_to_avoid_is_used_once_it_is_free() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        job = Waiter(cluster, gang=1)
        assert len(await job.serve(2)) == 2
        assert await job.serve(1) == []
        assert job.demand() == [1]
        await job.ended("b")
        assert await job.serve(1) == ["b"]
        assert job.demand() == []

    play(scenario)


def test_what_is_wanted_no_more_is_demanded_no_more() -> None:
    async def scenario() -> None:
        cluster = FakeCluster()
        job = Waiter(cluster, gang=2)
        assert await job.serve(5) == []
        assert await job.serve(3, wait=False) == []
        assert job.demand() == [2, 1]
        assert await job.serve(0, wait=False) == []
        assert job.demand() == [] and cluster.groups == {}

    play(scenario)


def test_a_barred_ray_node_is_not_used_again_though_the_gang_keeps_its_bundle_there() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1, c=1)
        job = Waiter(cluster, gang=2)
        bad, _good = await job.serve(2)
        await job.ended(bad)
        assert await job.serve(1, barred=frozenset({bad})) == ["c"]

    play(scenario)


def test_a_group_that_the_head_does_not_remove_now_is_removed_when_it_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PAUSE_S", 0.01)

    async def scenario() -> None:
        cluster = FakeCluster(a=1)
        job = Waiter(cluster, gang=1)
        assert await job.serve(1) == ["a"]
        cluster.fails = 3
        await job.ended("a")
        assert job.rooms.groups == {}
        while cluster.groups:
            await asyncio.sleep(0.01)

    play(scenario)


def test_the_groups_of_an_earlier_controller_are_kept_where_it_had_nodes() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(a=1, b=1)
        before = Waiter(cluster, gang=2)
        assert len(await before.serve(3)) == 2
        (name,) = [name for name, group in before.rooms.groups.items() if group.taken]
        after = Waiter(cluster, gang=2)
        await after.rooms.find({name: 2}, {"x": (name, 0), "y": (name, 1)})
        assert list(cluster.groups) == [name]
        assert after.rooms.groups[name].taken == {0: "x", 1: "y"}

    play(scenario)
