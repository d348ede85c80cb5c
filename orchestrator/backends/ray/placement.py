"""Placement groups of one job: room for its nodes, one bundle each.

The first nodes.min nodes share one group (the gang), which Ray places as a whole or not at all: two
jobs can never hold half of what each of them needs. Every further node has a group of one bundle.
All wanted nodes are requested at once: a group without a place stays pending, and Ray's autoscaler
adds Ray nodes for it. While the gang is pending, a further group that was placed is removed again.

Ray cannot keep groups apart from one another: a new group is given the Ray nodes to avoid that the
job has already, and of several groups made at the same time that got the same Ray node, all but one
are made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.backends import RAY_NODE_ID

from . import names, ray_nodes
from .actors import HEAD_PAUSE_S, until_head_answers

WAIT_SLICE_S = 10
"""One wait in a thread, so that the thread ends soon after its group was removed."""

ACCELERATOR_SHARE = 0.001
"""Ray gives each Ray node with such GPUs one `accelerator_type:...`, and takes as much for a task
with `accelerator_type`."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

log = logging.getLogger("holdfast.ray")


@dataclass(frozen=True)
class PlacementTiming:
    place_s: float = 0.7
    """Ray places a group in milliseconds where there is room, and within half a second where a node
    was just released; after this there is no room now."""
    recheck_s: float = 1.0
    """Seconds between two looks at a bundle whose Ray node has ended: the head finds out late."""
    head_pause_s: float = HEAD_PAUSE_S
    """Seconds between two calls to a head that does not answer."""


def bundle_of(job: TrainingJob) -> dict[str, float]:
    """A node's share of a Ray node. Without spec.resources.cpu: a core per worker."""
    workers, each = job.spec.workers_per_node, job.spec.resources
    bundle = {"CPU": float(each.cpu if each.cpu is not None else 1) * workers}
    if each.num_gpus:
        bundle["GPU"] = float(each.num_gpus * workers)
    if each.memory is not None:
        bundle["memory"] = float(int(each.memory) * workers)
    if (kind := job.spec.ray.accelerator_type) is not None:
        bundle[f"accelerator_type:{kind}"] = ACCELERATOR_SHARE
    return bundle | {name: float(n) for name, n in job.spec.ray.custom_resources.items()}


@dataclass(eq=False)
class PlacementGroupHandle:
    """One placement group."""

    name: str
    size: int
    handle: Any = None
    avoided: frozenset[str] = frozenset()
    """Ray nodes that it avoids since it was made."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Bundle -> node."""
    name_used: bool = False
    """A node has, or had, the node name in the group's name."""
    placed: bool = False
    ray_nodes: dict[int, str] = field(default_factory=dict)
    """Bundle -> Ray node, as last seen."""
    excluded: frozenset[str] = frozenset()
    """Ray nodes where no more nodes are started. A group of several nodes keeps its bundle there:
    Ray can take back only whole groups, and moves the bundle when the Ray node has ended."""
    waiter: asyncio.Task[None] | None = None
    """Waits until the group is placed."""
    removed: bool = False

    def free(self) -> list[int]:
        """Bundles for further nodes."""
        return [
            bundle
            for bundle in range(self.size)
            if bundle not in self.nodes and self.ray_nodes.get(bundle, "") not in self.excluded
        ]


Bundle = tuple[PlacementGroupHandle, int]


class GroupState(NamedTuple):
    """Ray's report of a group."""

    created: bool
    ray_nodes: dict[int, str]
    """Bundle -> Ray node, of bundles that have a place."""


class GroupApi(Protocol):
    """Placement groups of one job. Methods that are no coroutines block for a round trip."""

    def make(self, node: str, size: int, avoided: frozenset[str]) -> PlacementGroupHandle:
        """Named after its first node; STRICT_SPREAD, and on none of the `avoided` Ray nodes."""

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        """A group of an earlier controller."""

    def remove(self, group: PlacementGroupHandle) -> None:
        """Remove the group with the actors in it. A group that does not exist is removed
        already."""

    def states(self) -> dict[str, GroupState]:
        """All groups of this job that exist, of any controller."""

    async def wait(self, group: PlacementGroupHandle) -> None:
        """Wait until it has been placed."""

    async def large(self) -> set[str]:
        """Ray nodes that could hold a bundle if they were empty."""

    async def answering(self, nodes: Iterable[str]) -> set[str]:
        """The Ray nodes among these that certainly exist."""


class RayGroups:
    """Implements GroupApi."""

    def __init__(
        self,
        job: str,
        bundle: dict[str, float],
        selector: Mapping[str, str] | None = None,
        pause_s: float = HEAD_PAUSE_S,
    ) -> None:
        """`selector`: labels of the Ray nodes to use."""
        self._job, self._bundle, self._pause_s = job, bundle, pause_s
        self._selector = dict(selector or {})

    def make(self, node: str, size: int, avoided: frozenset[str]) -> PlacementGroupHandle:
        from ray.util.placement_group import placement_group

        selector = dict(self._selector)
        if avoided:
            selector[RAY_NODE_ID] = f"!in({','.join(sorted(avoided))})"
        name = names.group(self._job, node)
        handle = placement_group(
            [dict(self._bundle)] * size, strategy="STRICT_SPREAD", name=name, lifetime="detached",
            bundle_label_selector=[selector] * size if selector else None,
        )  # fmt: skip
        return PlacementGroupHandle(name, size, handle, avoided)

    def find(self, name: str, size: int) -> PlacementGroupHandle | None:
        from ray.util.placement_group import get_placement_group

        try:
            return PlacementGroupHandle(name, size, get_placement_group(name))
        except ValueError:
            return None

    def remove(self, group: PlacementGroupHandle) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group.handle)

    def states(self) -> dict[str, GroupState]:
        from ray.util.placement_group import placement_group_table

        prefix = names.group(self._job, "")
        states = {}
        for group in placement_group_table().values():
            if group["name"].startswith(prefix) and group["state"] != "REMOVED":
                bundles = group.get("bundles_to_node_id", {})
                placed = {int(bundle): str(node) for bundle, node in bundles.items() if node}
                states[group["name"]] = GroupState(group["state"] == "CREATED", placed)
        return states

    async def wait(self, group: PlacementGroupHandle) -> None:
        # In a thread of its own: asyncio's shared threads are few, and a group may wait for days.
        loop = asyncio.get_running_loop()
        placed: asyncio.Future[None] = loop.create_future()

        def set_placed() -> None:
            if not placed.done():
                placed.set_result(None)

        def wait() -> None:
            while not placed.done() and not group.removed:
                try:
                    if group.handle.wait(WAIT_SLICE_S):
                        break
                # Ray's own RpcError or a plain Exception: the head restarts, or it is removed.
                except Exception as error:
                    if not group.removed:
                        log.warning("waiting for %s: %s; trying again", group.name, error)
                    time.sleep(self._pause_s)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(set_placed)

        threading.Thread(target=wait, name=f"wait for {group.name}", daemon=True).start()
        await placed

    async def large(self) -> set[str]:
        alive = await asyncio.to_thread(ray_nodes.alive_nodes)
        return {k for k, v in alive.items() if ray_nodes.suits(self._bundle, self._selector, v)}

    async def answering(self, nodes: Iterable[str]) -> set[str]:
        return await ray_nodes.answering(nodes)


def remove_all(job: str) -> None:
    """Remove the groups with the actors in them."""
    groups = RayGroups(job, {})
    for name in groups.states():
        if (group := groups.find(name, 1)) is not None:
            groups.remove(group)


class GangPlacement:
    """Decides which groups exist, and which of their bundles may be used. One caller at a time: the
    backend holds a lock."""

    def __init__(
        self,
        api: GroupApi,
        gang: int,
        next_name: Callable[[], str],
        spawn: Spawn,
        on_placed: Callable[[], None],
        timing: PlacementTiming | None = None,
    ) -> None:
        """`on_placed`: a pending group was placed, so `serve` may return more bundles."""
        self._api, self._gang, self._next_name = api, gang, next_name
        self._spawn, self._on_placed = spawn, on_placed
        self._timing = timing or PlacementTiming()
        self.groups: dict[str, PlacementGroupHandle] = {}
        self.dead: set[str] = set()
        """Ray nodes that have ended, where the head might still place a bundle."""
        self._excluded: frozenset[str] = frozenset()
        self._gang_first = False
        """A further group was placed before the gang: none is made until the gang is placed."""
        self._changed = asyncio.Event()
        self._rechecking: asyncio.Task[None] | None = None

    async def adopt(self, sizes: Mapping[str, int], nodes: Mapping[str, tuple[str, int]]) -> None:
        """Keep an earlier controller's groups that have nodes, and remove its others."""
        for name in await asyncio.to_thread(self._api.states):
            group = await asyncio.to_thread(self._api.find, name, sizes.get(name, 1))
            if group is None:
                continue
            group.nodes = {bundle: node for node, (own, bundle) in nodes.items() if own == name}
            group.name_used = True
            self.groups[name] = group
        await self.remove_empty()
        await self._refresh()

    async def remove_empty(self) -> None:
        for group in [group for group in self.groups.values() if not group.nodes]:
            await self.remove(group)

    async def serve(self, missing: int, excluded: frozenset[str], *, wait: bool) -> list[Bundle]:
        """Bundles to use for `missing` nodes; exactly the rest stays requested. `excluded`: Ray
        nodes not to use. `wait`: give new groups time to be placed."""
        self._excluded = excluded
        await self._review_dead()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._timing.place_s * (1 + missing)
        while True:
            await self._refresh()
            await self._drop_misplaced()
            groups = await self._request(missing)
            if not groups or not wait or loop.time() > give_up:
                break
            if not await self._until_placed_or_full(groups):
                break
        return (await self._usable())[:missing]

    async def remove(self, group: PlacementGroupHandle) -> None:
        """Returns when it is removed; where the head does not answer, that is retried later."""
        if group.name not in self.groups:
            return
        self._forget(group)
        try:
            await asyncio.to_thread(self._api.remove, group)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("removing %s: %s; trying again", group.name, error)
            retry = until_head_answers(
                lambda: self._api.remove(group),
                f"removing {group.name}",
                self._timing.head_pause_s,
            )
            self._spawn(retry)

    def _forget(self, group: PlacementGroupHandle) -> None:
        self.groups.pop(group.name)
        group.removed = True
        if group.waiter is not None:
            group.waiter.cancel()

    # -- what exists ---------------------------------------------------------------------------
    async def _refresh(self) -> None:
        states = await asyncio.to_thread(self._api.states)
        for group in list(self.groups.values()):
            state = states.get(group.name)
            if state is None and not group.nodes:
                self._forget(group)  # removed by another process
                continue
            group.placed, group.ray_nodes = state if state is not None else (False, {})
            group.excluded = self._excluded

    async def _review_dead(self) -> None:
        """Forget dead Ray nodes that the head has noticed, since it places nothing there; pending
        groups that avoid them stay. Whether the others answer again is checked in the background,
        because a lost machine may not even refuse a connection."""
        if not self.dead:
            return
        listed = await self._api.large()
        noticed = self.dead - listed
        self.dead -= noticed
        for group in self.groups.values():
            group.avoided -= noticed
        if self.dead and (self._rechecking is None or self._rechecking.done()):
            self._rechecking = self._spawn(self._recheck(set(self.dead)))

    async def _recheck(self, dead: set[str]) -> None:
        try:
            answering = await self._api.answering(dead)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("the head does not list its Ray nodes: %s", error)
            return
        if answering:
            self.dead -= answering
            self._on_placed()

    def _in_use(self) -> set[str]:
        """Ray nodes that a further group must avoid, also for groups without nodes."""
        return {node for group in self.groups.values() for node in group.ray_nodes.values()}

    def _gang_pending(self) -> bool:
        return any(g.size > 1 and not g.nodes and not g.placed for g in self.groups.values())

    async def _usable(self) -> list[Bundle]:
        if self._gang_pending():
            return []
        free = [
            (group, bundle)
            for group in self.groups.values()
            for bundle in group.free()
            if group.placed and bundle in group.ray_nodes
        ]
        # The head has just spoken to the Ray nodes of a new group. The Ray node of an older group
        # may have ended; Ray then moves the bundle.
        doubtful = {group.ray_nodes[bundle] for group, bundle in free if group.nodes}
        ended = doubtful - (await self._api.answering(doubtful) if doubtful else set())
        for group in self.groups.values():
            if not group.placed or ended & set(group.ray_nodes.values()):
                self._await(group)
        # Meanwhile the last node of a group may have ended, and the group with it.
        left = [(group, bundle) for group, bundle in free if not group.removed]
        return [(group, bundle) for group, bundle in left if group.ray_nodes[bundle] not in ended]

    # -- what is requested ---------------------------------------------------------------------
    async def _drop_misplaced(self) -> None:
        gang_pending = self._gang_pending()
        in_use: set[str] = set()
        # Groups with nodes come first: they stay where they are.
        for group in sorted(self.groups.values(), key=lambda g: (not g.nodes, g.size == 1)):
            own = set(group.ray_nodes.values())
            if not group.nodes and group.size == 1 and group.placed:
                if gang_pending:
                    self._gang_first = True
                if gang_pending or own & (in_use | self._excluded):
                    await self.remove(group)
                    continue
            in_use |= own
        self._gang_first &= gang_pending

    async def _request(self, missing: int) -> list[PlacementGroupHandle]:
        """Make and remove groups until exactly `missing` bundles are free; returns the new ones."""
        avoided = frozenset(self._in_use() | self._excluded | self.dead)
        has_gang = any(group.nodes or group.size > 1 for group in self.groups.values())
        needs_gang = self._gang > 1 and not has_gang
        for group in [group for group in self.groups.values() if not group.nodes]:
            # It is pending and avoids Ray nodes that could be used by now.
            stale = not group.placed and group.avoided - avoided
            if needs_gang or stale:
                await self.remove(group)
                needs_gang |= group.size > 1
        missing -= sum(len(group.free()) for group in self.groups.values())
        await self._withdraw(-missing)
        groups: list[PlacementGroupHandle] = []
        if missing > 0 and needs_gang:
            groups += await self._make(1, min(missing, self._gang), avoided)
            missing -= groups[0].size
        if missing > 0 and not self._gang_first:
            groups += await self._make(missing, 1, avoided)
        return groups

    async def _withdraw(self, surplus: int) -> None:
        """Remove groups that are no longer wanted: pending ones first, the gang last."""
        unused = [group for group in self.groups.values() if not group.nodes]
        for group in sorted(unused, key=lambda g: (g.size, g.placed)):
            if len(group.free()) <= surplus:
                surplus -= len(group.free())
                await self.remove(group)

    async def _make(
        self, count: int, size: int, avoided: frozenset[str]
    ) -> list[PlacementGroupHandle]:
        calls = [
            asyncio.to_thread(self._api.make, self._next_name(), size, avoided)
            for _ in range(count)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        groups = [group for group in results if isinstance(group, PlacementGroupHandle)]
        for group in groups:
            group.excluded = self._excluded
            self.groups[group.name] = group
            self._await(group)
        for error in results:
            if isinstance(error, BaseException):
                raise error
        return groups

    # -- waiting -------------------------------------------------------------------------------
    def _await(self, group: PlacementGroupHandle) -> None:
        if group.waiter is None or group.waiter.done():
            group.waiter = self._spawn(self._until_placed(group))

    async def _until_placed(self, group: PlacementGroupHandle) -> None:
        if group.nodes:
            await asyncio.sleep(self._timing.recheck_s)
        await self._api.wait(group)
        group.placed = True
        self._changed.set()
        self._on_placed()

    async def _until_placed_or_full(self, made: list[PlacementGroupHandle]) -> bool:
        """Wait until every group that the cluster can hold is placed, or no further one was placed
        for a while. Returns whether any was."""
        loop = asyncio.get_running_loop()
        counting = loop.create_task(self._num_possible(made))
        counting.add_done_callback(lambda _: self._changed.set())
        num_placed, give_up = 0, loop.time() + self._timing.place_s
        try:
            while True:
                now_placed = sum(group.placed for group in made)
                if now_placed > num_placed:
                    num_placed, give_up = now_placed, loop.time() + self._timing.place_s
                if num_placed == len(made) or (counting.done() and num_placed >= counting.result()):
                    return num_placed > 0
                self._changed.clear()
                async with asyncio.timeout_at(give_up):
                    await self._changed.wait()
        except TimeoutError:
            return num_placed > 0
        finally:
            counting.cancel()

    async def _num_possible(self, made: list[PlacementGroupHandle]) -> int:
        """Number of these groups that the cluster could hold if no other job used it."""
        away = self._in_use() | self._excluded | self.dead
        try:
            room = len(await self._api.answering(await self._api.large() - away))
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("the head does not report the size of the cluster: %s", error)
            return len(made)
        possible = 0
        for group in made:  # the gang first
            if group.size > room:
                break
            room -= group.size
            possible += 1
        return possible
