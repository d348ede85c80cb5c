"""Room for the nodes of one job: its placement groups as a whole.

Owns: how many groups there are and of what size, which bundles may be used, and what is demanded of
the cluster. Must not: start actors, or write anything down; the backend does.

The first nodes.min nodes share one group (the gang), which Ray places as a whole or not at all: two
jobs can never hold half of what each of them needs. Every further node has a group of one bundle.
All that is wanted is demanded at once: a group without a place stays, and is what Ray's autoscaler
adds Ray nodes for. Until the gang has its place, a further group that got one gives it back.

Ray cannot keep groups apart from one another: a new group is told which Ray nodes the job has
already, and one of several made at the same time that got the same as another is made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from .placement_groups import Maker, PlacementGroupHandle
from .retry import patiently

PLACE_S = 0.7
"""Ray places a group in milliseconds where there is room, and within half a second where a node
has just been given back; past this there is none now."""
AGAIN_S = 1.0
"""A bundle whose Ray node is gone is looked at again: the head finds out late, and tells nobody."""

Bundle = tuple[PlacementGroupHandle, int]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

log = logging.getLogger("holdfast.ray")


class GangPlacement:
    """One caller at a time: the backend has a lock."""

    def __init__(
        self, maker: Maker, gang: int, next_name: Callable[[], str],
        spawn: Spawn, on_room: Callable[[], None],
    ) -> None:  # fmt: skip
        """`on_room`: a group that waited has a place; `serve` says which."""
        self._maker, self._gang, self._next_name = maker, gang, next_name
        self._spawn, self._on_room = spawn, on_room
        self.groups: dict[str, PlacementGroupHandle] = {}
        self.dead: set[str] = set()
        """Ray nodes that are gone, though the head may not have noticed and would place there."""
        self._barred: frozenset[str] = frozenset()
        self._gang_first = False
        """A further group got a place before the gang did: none is made until that has one."""
        self._news = asyncio.Event()
        self._reviewing: asyncio.Task[None] | None = None

    async def find(self, sizes: Mapping[str, int], nodes: Mapping[str, tuple[str, int]]) -> None:
        """Those of an earlier controller that have nodes; the others are removed."""
        for name in await asyncio.to_thread(self._maker.table):
            group = await asyncio.to_thread(self._maker.find, name, sizes.get(name, 1))
            if group is None:
                continue
            group.taken = {bundle: node for node, (own, bundle) in nodes.items() if own == name}
            group.named = True
            self.groups[name] = group
        await self.remove_empty()
        await self._look()

    async def remove_empty(self) -> None:
        """Those without a node, also of nodes that ended while no controller was there."""
        for group in [group for group in self.groups.values() if not group.taken]:
            await self.remove(group)

    async def serve(self, missing: int, barred: frozenset[str], *, wait: bool) -> list[Bundle]:
        """Bundles to use for `missing` nodes; what is missing beyond them stays demanded, no more
        and no less. `barred`: Ray nodes not to use. `wait`: new groups get time to be placed."""
        self._barred = barred
        await self._review_dead()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PLACE_S * (1 + missing)
        while True:
            await self._look()
            await self._drop_misplaced()
            made = await self._demand(missing)
            if not made or not wait or loop.time() > give_up:
                break
            if not await self._settle(made):
                break
        return (await self._usable())[:missing]

    async def remove(self, group: PlacementGroupHandle) -> None:
        """Returns when it is gone, or when the head does not answer: then it is tried again."""
        if group.name not in self.groups:
            return
        self._forget(group)
        try:
            await asyncio.to_thread(self._maker.remove, group)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("removing %s: %s; trying again", group.name, error)
            self._spawn(patiently(lambda: self._maker.remove(group), f"removing {group.name}"))

    def _forget(self, group: PlacementGroupHandle) -> None:
        self.groups.pop(group.name)
        group.over = True
        if group.task is not None:
            group.task.cancel()

    # -- what there is -------------------------------------------------------------------------
    async def _look(self) -> None:
        table = await asyncio.to_thread(self._maker.table)
        for group in list(self.groups.values()):
            found = table.get(group.name)
            if found is None and not group.taken:
                self._forget(group)  # somebody has removed it
                continue
            group.placed, group.places = found if found is not None else (False, {})
            group.barred = self._barred

    async def _review_dead(self) -> None:
        """Where the head has noticed it, it puts nothing there by itself: that is forgotten, and no
        group that waits is made anew because of it. What answers after all may be used again; that
        is found out beside the placing, since those that are gone may not even refuse."""
        if not self.dead:
            return
        there = await self._maker.large()
        noticed = self.dead - there
        self.dead -= noticed
        for group in self.groups.values():
            group.shun -= noticed
        if self.dead and (self._reviewing is None or self._reviewing.done()):
            self._reviewing = self._spawn(self._trust_again(set(self.dead)))

    async def _trust_again(self, dead: set[str]) -> None:
        try:
            answering = await self._maker.answering(dead)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("which Ray nodes answer again cannot be seen: %s", error)
            return
        if answering:
            self.dead -= answering
            self._on_room()

    def _in_use(self) -> set[str]:
        """Ray nodes that a further group may not have, those of groups without nodes included."""
        return {place for group in self.groups.values() for place in group.places.values()}

    def _gang_waits(self) -> bool:
        return any(g.size > 1 and not g.taken and not g.placed for g in self.groups.values())

    async def _usable(self) -> list[Bundle]:
        if self._gang_waits():
            return []
        free = [
            (group, bundle)
            for group in self.groups.values()
            for bundle in group.free()
            if group.placed and bundle in group.places
        ]
        # A new group is where the head has just spoken to. An old one may be on a Ray node that is
        # gone: Ray finds another place for it.
        doubtful = {group.places[bundle] for group, bundle in free if group.taken}
        there = await self._maker.answering(doubtful) if doubtful else set()
        gone = doubtful - there
        for group in self.groups.values():
            if not group.placed or gone & set(group.places.values()):
                self._await(group)
        # The last node of a group may have ended meanwhile, and the group with it.
        left = [(group, bundle) for group, bundle in free if not group.over]
        return [(group, bundle) for group, bundle in left if group.places.get(bundle) not in gone]

    # -- what is demanded ----------------------------------------------------------------------
    async def _drop_misplaced(self) -> None:
        waits = self._gang_waits()
        in_use: set[str] = set()
        # In this order: who has nodes stays where it is.
        for group in sorted(self.groups.values(), key=lambda g: (not g.taken, g.size == 1)):
            places = set(group.places.values())
            if not group.taken and group.size == 1 and group.placed:
                if waits:
                    self._gang_first = True
                if waits or places & (in_use | self._barred):
                    await self.remove(group)
                    continue
            in_use |= places
        self._gang_first &= waits

    async def _demand(self, missing: int) -> list[PlacementGroupHandle]:
        """As many groups as are wanted; returns the new ones."""
        shun = frozenset(self._in_use() | self._barred | self.dead)
        without_gang = not any(group.taken or group.size > 1 for group in self.groups.values())
        begins = self._gang > 1 and without_gang
        for group in [group for group in self.groups.values() if not group.taken]:
            # Stale: it waits, and stays away from what could be used by now.
            stale = not group.placed and group.shun - shun
            if begins or stale:
                await self.remove(group)
                begins |= group.size > 1
        missing -= sum(len(group.free()) for group in self.groups.values())
        await self._withdraw(-missing)
        made: list[PlacementGroupHandle] = []
        if missing > 0 and begins:
            made += await self._make(1, min(missing, self._gang), shun)
            missing -= made[0].size
        if missing > 0 and not self._gang_first:
            made += await self._make(missing, 1, shun)
        return made

    async def _withdraw(self, surplus: int) -> None:
        """Groups that nobody wants any more: first those without a place, the gang last."""
        unused = [group for group in self.groups.values() if not group.taken]
        for group in sorted(unused, key=lambda g: (g.size, g.placed)):
            if len(group.free()) <= surplus:
                surplus -= len(group.free())
                await self.remove(group)

    async def _make(
        self, count: int, size: int, shun: frozenset[str]
    ) -> list[PlacementGroupHandle]:
        made = await asyncio.gather(
            *(
                asyncio.to_thread(self._maker.make, self._next_name(), size, shun)
                for _ in range(count)
            ),
            return_exceptions=True,
        )
        groups = [group for group in made if isinstance(group, PlacementGroupHandle)]
        for group in groups:
            group.barred = self._barred
            self.groups[group.name] = group
            self._await(group)
        for error in made:
            if isinstance(error, BaseException):
                raise error
        return groups

    # -- waiting -------------------------------------------------------------------------------
    def _await(self, group: PlacementGroupHandle) -> None:
        if group.task is None or group.task.done():
            group.task = self._spawn(self._until_placed(group))

    async def _until_placed(self, group: PlacementGroupHandle) -> None:
        if group.taken:
            await asyncio.sleep(AGAIN_S)
        await self._maker.wait(group)
        group.placed = True
        self._news.set()
        self._on_room()

    async def _settle(self, made: list[PlacementGroupHandle]) -> bool:
        """Until all of them that can have a place now do, as far as anybody knows, or none has got
        one for a while. Returns whether any has."""
        loop = asyncio.get_running_loop()
        looking = loop.create_task(self._num_possible(made))
        looking.add_done_callback(lambda _: self._news.set())
        placed, give_up = 0, loop.time() + PLACE_S
        try:
            while True:
                if (now_placed := self._num_placed(made)) > placed:
                    placed, give_up = now_placed, loop.time() + PLACE_S
                if placed == len(made) or (looking.done() and placed >= looking.result()):
                    return placed > 0
                self._news.clear()
                async with asyncio.timeout_at(give_up):
                    await self._news.wait()
        except TimeoutError:
            return placed > 0
        finally:
            looking.cancel()

    def _num_placed(self, made: list[PlacementGroupHandle]) -> int:
        return sum(group.placed for group in made)

    async def _num_possible(self, made: list[PlacementGroupHandle]) -> int:
        """How many of them the cluster is large enough for, whoever else uses it."""
        away = self._in_use() | self._barred | self.dead
        try:
            large = len(await self._maker.answering(await self._maker.large() - away))
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("how large the cluster is cannot be seen at this moment: %s", error)
            return len(made)
        possible = 0
        for group in made:  # the gang first
            if group.size > large:
                break
            large -= group.size
            possible += 1
        return possible
