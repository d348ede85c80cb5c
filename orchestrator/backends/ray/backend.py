"""The nodes of one job as actors of a Ray cluster.

Owns: which nodes there are, their placement and their actors; noticing that one ended. Must not:
talk to agents beyond their actors' few calls; they dial in to the controller by themselves.

A node's end is told by the call that waits for it inside its actor: it returns when the agent's
process has ended, and fails when the actor or its Ray node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from ...protocol.certificate import Keys as Secrets
from ...protocol.facts import NodeFacts
from ...protocol.spec import TrainingJob
from ..base import NodeGone, NoRoom, Starts
from . import actors, cluster, groups, places
from .agent import AgentOrder
from .drains import Drains, NoticeSink, Places
from .groups import Group
from .known import Keeper, Known
from .kv import Keys

PLACE_S = 0.7
"""Ray places a group in milliseconds where there is room, and within half a second where a node
has just been given back; past this there is none now."""
ANSWER_S = 1.0
"""An actor whose connection broke and that does not answer within this has ended."""
END_S = 10.0

log = logging.getLogger("holdfast.ray")


class RayBackend:
    """Implements backends.base.Backend."""

    def __init__(
        self, job: TrainingJob, job_id: str, keys: Keys, secrets: Secrets, *,
        on_notice: NoticeSink = lambda node, detail, grace_s: None,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`on_notice`: Ray will take a node away. `on_move`: and this controller's own Ray node."""
        self._job, self._job_id, self._secrets = job, job_id, secrets
        self._keeper = Keeper(keys)
        self._bundle = groups.bundle_of(job)
        self._known = Known()
        self._groups: dict[str, Group] = {}
        self._actors: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        """Node -> Ray node, of those that have come up."""
        self._topology: dict[str, tuple[str, ...]] = {}
        self._drains = Drains(Places(self._places, self._actors), on_notice, on_move)
        self._unclaimed: list[str] = []
        """Started when room was found for an earlier request, and not given out yet."""
        self._missing = 0
        self._address, self._port = "127.0.0.1", 0
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._withheld_until = 0.0
        self._closing = False

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        self._known = await self._keeper.load()
        await asyncio.to_thread(self._find_groups)
        for node in list(self._known.nodes):
            actor = await asyncio.to_thread(actors.find, self._job.name, node)
            if actor is not None:
                self._adopt(node, actor)
            elif node in self._known.starting and self._group_of(node) is not None:
                self._start_actor(node)
            else:
                self._forget(node)
        await self._keeper.save()
        self._spawn(self._drains.watch())

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        left_s = self._withheld_until - asyncio.get_running_loop().time()
        if left_s > 0:
            raise NoRoom(f"replacements are withheld for another {left_s:.0f} s (rehearsal)")
        async with self._lock:
            given = [node for node in self._unclaimed if node in self._known.nodes][:count]
            self._unclaimed = [node for node in self._unclaimed if node not in given]
            shun = {self._places[node] for node in avoid if node in self._places}
            shun |= self._drains.ray_nodes.keys()
            for group in list(self._groups.values()):
                await asyncio.to_thread(group.bar, frozenset(self._drains.ray_nodes))
            self._missing = count - len(given)
            given += await self._place(self._missing, shun)
            self._missing = count - len(given)
            if not given:
                raise NoRoom(await asyncio.to_thread(cluster.shortage, count, self._bundle))
            return tuple(given)

    async def release_node(self, node: str) -> None:
        actor = self._actors.get(node)
        if actor is not None:
            self._spawn(self._end(actor))
        if not self._known.nodes.keys() - {node}:
            await self._drop_demand()

    async def list_nodes(self) -> tuple[str, ...]:
        # Asked when an agent's link has closed. Ray's head takes seconds to notice a lost machine,
        # and nobody else tells.
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look())
        await asyncio.wait([self._looking])
        return tuple(sorted(self._known.nodes))

    def starts(self) -> Starts:
        return Starts()

    async def close(self, *, release: bool) -> None:
        self._closing = True
        if release:
            await self._end_everything()
        if self._settling is not None:
            await asyncio.wait([self._settling], timeout=END_S)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self._keeper.settle()

    # -- beside the contract -------------------------------------------------------------------
    def facts_of(self, node: str, facts: NodeFacts) -> NodeFacts:
        """What an agent says of its node when it joins, with what Ray knows better: where it is."""
        self._drains.joined(node)
        return msgspec.structs.replace(facts, topology=self._topology.get(node, ()))

    def set_endpoint(self, address: str, port: int) -> None:
        """Where the controller listens from now on; running agents are told."""
        self._address, self._port = address, port
        for actor in self._actors.values():
            actor.set_endpoint.remote(address, port)

    def withhold(self, seconds: float) -> None:
        """Rehearsal: have no room for this long."""
        self._withheld_until = asyncio.get_running_loop().time() + seconds

    # -- placing -------------------------------------------------------------------------------
    async def _place(self, count: int, shun: set[str]) -> list[str]:
        """Start up to `count` nodes, as many as have room now; what is missing stays demanded."""
        if count <= 0:
            return []
        started = await self._fill(count)
        wanted = count - len(started)
        first = not self._known.nodes and not self._groups
        while wanted > 0:
            demanded = sum(len(group.free()) for group in self._groups.values())
            if demanded >= wanted:
                break
            size = min(wanted, self._job.spec.nodes.min) if first else 1
            group = await self._make_group(size, shun)
            await asyncio.wait([self._awaited(group)], timeout=PLACE_S)
            filled = await self._fill(wanted)
            started += filled
            wanted -= len(filled)
            if first and not filled:
                break  # not even the minimum: nothing is started
            first = False
        return started

    async def _make_group(self, size: int, shun: set[str]) -> Group:
        used = {self._places[node] for node in self._known.nodes if node in self._places}
        for group in self._groups.values():
            if group.placed:
                used |= set((await asyncio.to_thread(group.ray_nodes)).values())
        node = f"node-{self._known.next_number}"
        group = await asyncio.to_thread(
            groups.make, self._job.name, node, size, self._bundle, used | shun
        )
        self._groups[group.name] = group
        self._known.groups[group.name] = size
        self._known.next_number += 1  # its name is its group's, whether a node ever has it or not
        await self._keeper.save()
        return group

    def _awaited(self, group: Group) -> asyncio.Task[None]:
        if group.task is None or group.task.done():
            group.task = self._spawn(self._until_placed(group))
        return group.task

    async def _until_placed(self, group: Group) -> None:
        await group.wait()
        group.placed = True
        if self._lock.locked():
            return  # whoever asked is looking
        # Room was found for what was asked before: the nodes come by themselves.
        async with self._lock:
            started = await self._fill(self._missing)
            self._missing -= len(started)
            self._unclaimed += started
            if not group.taken:
                await self._remove_group(group)

    async def _fill(self, count: int) -> list[str]:
        """Start nodes in free bundles that have a place."""
        started: list[str] = []
        for group in list(self._groups.values()):
            if len(started) >= count or not group.placed or not group.free():
                continue
            if group.size > 1 and group.taken and not await asyncio.to_thread(group.whole):
                # Ray looks for another place for the bundle of a Ray node that was lost.
                self._awaited(group)
                group.placed = False
                continue
            for bundle in group.free()[: count - len(started)]:
                started.append(await self._start_node(group, bundle))
        return started

    async def _start_node(self, group: Group, bundle: int) -> str:
        own = group.name.rpartition("/")[2]
        node = own
        if own in self._known.nodes or group.taken or bundle:
            node = f"node-{self._known.next_number}"
            self._known.next_number += 1
        group.taken[bundle] = node
        self._known.nodes[node] = (group.name, bundle)
        self._known.starting.add(node)
        await self._keeper.save()  # first: what is not written down may not exist
        self._start_actor(node)
        return node

    # -- actors --------------------------------------------------------------------------------
    def _start_actor(self, node: str) -> None:
        group, (_, bundle) = self._group_of(node), self._known.nodes[node]
        assert group is not None
        order = AgentOrder(
            job=self._job.name,
            node=node,
            slots=self._job.spec.workers_per_node,
            job_id=self._job_id,
            token=self._secrets.token,
            key=self._secrets.key,
            certificate=self._secrets.certificate,
            address=self._address,
            port=self._port,
            env=dict(self._job.spec.env),
        )
        self._adopt(node, actors.start(order, group.handle, bundle, self._bundle))

    def _adopt(self, node: str, actor: Any) -> None:
        self._actors[node] = actor
        actor.set_endpoint.remote(self._address, self._port)
        self._spawn(self._learn(node, actor))
        self._spawn(self._watch(node, actor))

    async def _learn(self, node: str, actor: Any) -> None:
        from ray.exceptions import RayError

        try:
            facts = await actor.facts.remote()
        except RayError:
            return  # the watch tells why
        self._places[node] = place = facts["ray_node"]
        self._known.starting.discard(node)
        await self._keeper.save()
        self._topology[node] = await places.topology(place, self._job.spec.ray.topology_keys)

    async def _watch(self, node: str, actor: Any) -> None:
        detail = await actors.until_ended(actor, ANSWER_S)
        await asyncio.to_thread(actors.kill, actor)
        await self._ended(node, detail)

    async def _end(self, actor: Any) -> None:
        """The agent first: what is told of its end is then true of all its processes."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await actor.end.remote()
        await asyncio.to_thread(actors.kill, actor)

    async def _ended(self, node: str, detail: str) -> None:
        if node not in self._known.nodes:
            return
        group = self._group_of(node)
        self._forget(node)
        self._news.set()
        if not self._closing:
            log.info("%s: %s", node, detail, extra={"job": self._job.name})
            # At once: a recovery waits for it.
            self._on_node_gone(NodeGone(node, detail))
        # Also if this controller ends now: the room must not be held for nobody.
        self._settling = self._spawn(self._settle(group))
        await asyncio.shield(self._settling)

    async def _settle(self, group: Group | None) -> None:
        if group is not None and not group.taken:
            await self._remove_group(group)
        await self._keeper.save()

    def _forget(self, node: str) -> None:
        group = self._group_of(node)
        _name, bundle = self._known.nodes.pop(node)
        if group is not None:
            group.taken.pop(bundle, None)
        self._known.starting.discard(node)
        self._actors.pop(node, None)
        self._places.pop(node, None)
        self._topology.pop(node, None)

    def _group_of(self, node: str) -> Group | None:
        return self._groups.get(self._known.nodes[node][0])

    async def _look(self) -> None:
        """Tell of the nodes whose Ray node takes no connections any more."""
        if not self._places:
            return
        dead = await places.silent(set(self._places.values()))
        for node in [node for node, place in self._places.items() if place in dead]:
            if node in self._actors:
                await asyncio.to_thread(actors.kill, self._actors[node])
            await self._ended(node, f"its Ray node {self._places.get(node, '')[:8]} is gone")

    # -- groups --------------------------------------------------------------------------------
    def _find_groups(self) -> None:
        """Those that an earlier controller has made; those that it did not note are removed."""
        for name in groups.names_of(self._job.name):
            group = groups.find(name, self._known.groups.get(name, 1))
            if group is None:
                continue
            used = {b: n for n, (g, b) in self._known.nodes.items() if g == name}
            if not used:
                group.remove()
                self._known.groups.pop(name, None)
                continue
            group.taken, group.placed = used, True
            self._groups[name] = group
        self._known.groups = {name: group.size for name, group in self._groups.items()}

    async def _remove_group(self, group: Group) -> None:
        if self._groups.pop(group.name, None) is None:
            return
        self._known.groups.pop(group.name, None)
        if group.task is not None and group.task is not asyncio.current_task():
            group.task.cancel()
        await asyncio.to_thread(group.remove)

    async def _drop_demand(self) -> None:
        """Nobody waits for more nodes."""
        self._missing = 0
        for group in list(self._groups.values()):
            if not group.taken:
                await self._remove_group(group)

    async def _end_everything(self) -> None:
        self._missing = 0
        await asyncio.gather(*(self._end(actor) for actor in list(self._actors.values())))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + END_S
        while self._known.nodes and loop.time() < give_up:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up):
                    await self._news.wait()
        for group in list(self._groups.values()):
            await self._remove_group(group)  # takes whatever actor is left with it
        self._known.nodes.clear()
        await self._keeper.save()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the Ray backend failed", exc_info=error)
