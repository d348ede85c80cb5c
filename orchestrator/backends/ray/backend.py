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

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.certificate import TlsKeyPair as Secrets
from holdfast.orchestrator.protocol.facts import NodeFacts

from ..base import NodeGone, NoRoom, Starts
from . import actors, cluster, placement_groups, ray_nodes
from .agent import AgentOrder
from .drains import Drains, NoticeSink, RayNodeLookup
from .kv import JobKeyValueStore
from .node_registry import RayNodeRegistry, RegistryWriter
from .placement import Bundle, GangPlacement
from .placement_groups import PlacementGroupHandle
from .retry import patiently

ANSWER_S = 1.0
"""An actor whose connection broke and that does not answer within this has ended."""
END_S = 10.0

log = logging.getLogger("holdfast.ray")


class RayBackend:
    """Implements backends.base.Backend."""

    def __init__(
        self, job: TrainingJob, job_id: str, keys: JobKeyValueStore, secrets: Secrets, *,
        on_notice: NoticeSink = lambda node, detail, grace_s: None,
    ) -> None:  # fmt: skip
        """`on_notice`: Ray will take a node away."""
        self._job, self._job_id, self._secrets = job, job_id, secrets
        self._keeper = RegistryWriter(keys)
        self._bundle = placement_groups.bundle_of(job)
        self._known = RayNodeRegistry()
        self._rooms = GangPlacement(
            placement_groups.RayGroups(job.name, self._bundle), job.spec.nodes.min, self._next_name,
            self._spawn, self._room_came,
        )  # fmt: skip
        self._actors: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        """Node -> Ray node, of those that have come up."""
        self._topology: dict[str, tuple[str, ...]] = {}
        self._drains = Drains(RayNodeLookup(self._places, self._actors), on_notice)
        self._unwritten: set[str] = set()
        """Not written down yet: nobody may hear of them."""
        self._unclaimed: list[str] = []
        """Started when room was found for an earlier request, and not given out yet."""
        self._missing = 0
        """Of the last request; these are demanded of the cluster."""
        self._avoided: set[str] = set()
        """Ray nodes of nodes that are not trusted any more."""
        self._unwanted: set[str] = set()
        """Released before their actor was there."""
        self._address, self._port = "127.0.0.1", 0
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._withheld_until = 0.0
        self._closing = False

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        self._known = await self._keeper.load()
        await self._rooms.find(self._known.groups, self._known.nodes)
        for node in list(self._known.nodes):
            actor = await asyncio.to_thread(actors.find, self._job.name, node)
            if actor is not None:
                self._adopt(node, actor)
            elif node in self._known.starting and self._group_of(node) is not None:
                self._spawn(self._bring_up(node))
            else:
                self._forget(node)
        await self._rooms.remove_empty()
        await self._save()
        self._spawn(self._drains.watch())

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        left_s = self._withheld_until - asyncio.get_running_loop().time()
        if left_s > 0:
            raise NoRoom(f"replacements are withheld for another {left_s:.0f} s (rehearsal)")
        async with self._lock:
            given = [node for node in self._unclaimed if node in self._known.nodes][:count]
            self._unclaimed = [node for node in self._unclaimed if node not in given]
            self._avoided = {
                self._known.places[node] for node in avoid if node in self._known.places
            }
            self._missing = count - len(given)
            given += await self._fill(wait=True)
            if not given:
                raise NoRoom(await asyncio.to_thread(cluster.shortage, count, self._bundle))
            return tuple(given)

    async def release_node(self, node: str) -> None:
        if node not in self._known.nodes:
            return
        actor = self._actors.get(node)
        if actor is not None:
            self._spawn(self._end(actor))
        else:
            self._unwanted.add(node)

    async def list_nodes(self) -> tuple[str, ...]:
        # Asked when an agent's link has closed. Ray's head takes seconds to notice a lost machine,
        # and nobody else tells.
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look())
        await asyncio.wait([self._looking])
        return tuple(sorted(self._known.nodes.keys() - self._unwritten))

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

    async def trim(self, wanted: Callable[[], int]) -> None:
        """Demand no more than that many further nodes of the cluster. It is asked when it counts:
        a request may be under way."""
        async with self._lock:
            before, self._missing = self._missing, min(self._missing, wanted())
            if self._missing < before:
                try:
                    self._unclaimed += await self._fill(wait=False)
                except BaseException:
                    self._missing = before  # so that it is tried again
                    raise

    # -- placing -------------------------------------------------------------------------------
    async def _fill(self, *, wait: bool) -> list[str]:
        """Start as many of the missing nodes as have room now; the rest stays demanded."""
        if self._closing:
            return []
        barred = frozenset(self._drains.ray_nodes.keys() | self._avoided)
        bundles = await self._rooms.serve(self._missing, barred, wait=wait)
        started = await self._start(bundles)
        self._missing -= len(started)
        return started

    def _room_came(self) -> None:
        if self._serving is None or self._serving.done():
            self._serving = self._spawn(self._serve_waiting())

    async def _serve_waiting(self) -> None:
        """Room was found for what was asked before: the nodes come by themselves."""
        async with self._lock:
            self._serving = None  # what comes from now on may come too late for this look
            self._unclaimed += await self._fill(wait=False)

    async def _start(self, bundles: list[Bundle]) -> list[str]:
        started = []
        for group, bundle in bundles:
            node = group.name.rpartition("/")[2]
            if group.named or bundle:
                node = self._next_name()
            group.named = True
            group.taken[bundle] = node
            self._known.nodes[node] = (group.name, bundle)
            self._known.starting.add(node)
            started.append(node)
        self._unwritten |= set(started)
        try:
            if started:
                await self._save()  # first: what is not written down may not exist
        except BaseException:
            for node in started:
                self._forget(node)
            raise
        finally:
            self._unwritten -= set(started)
        for node in started:
            self._spawn(self._bring_up(node))
        return started

    def _next_name(self) -> str:
        """Its group's as well, whether a node ever has it or not."""
        self._known.next_number += 1
        return f"node-{self._known.next_number - 1}"

    async def _save(self) -> None:
        self._known.groups = {g.name: g.size for g in self._rooms.groups.values() if g.taken}
        await self._keeper.save()

    # -- actors --------------------------------------------------------------------------------
    async def _bring_up(self, node: str) -> None:
        if node not in self._known.nodes:
            return
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
        try:
            actor = await patiently(
                lambda: actors.start(order, group.handle, bundle, self._bundle), f"starting {node}"
            )
        except Exception as error:  # the head has not answered for long
            await self._ended(node, f"its actor was not started ({actors.first_line(error)})")
            return
        if node not in self._known.nodes:
            await self._kill(actor)
            return
        self._adopt(node, actor)
        if node in self._unwanted:
            await self._end(actor)

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
        self._places[node] = self._known.places[node] = place = facts["ray_node"]
        self._known.starting.discard(node)
        await self._save()
        self._topology[node] = await ray_nodes.topology(place, self._job.spec.ray.topology_keys)

    async def _watch(self, node: str, actor: Any) -> None:
        detail = await actors.until_ended(actor, ANSWER_S)
        await self._kill(actor)
        await self._ended(node, detail)

    async def _kill(self, actor: Any) -> None:
        """What is left of it; its group takes it along if the head does not answer now."""
        try:
            await asyncio.to_thread(actors.kill, actor)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("an actor was not killed: %s", error)

    async def _end(self, actor: Any) -> None:
        """The agent first: what is told of its end is then true of all its processes."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await actor.end.remote()
        await self._kill(actor)

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

    async def _settle(self, group: PlacementGroupHandle | None) -> None:
        if group is not None and not group.taken:
            await self._rooms.remove(group)
        await self._save()

    def _forget(self, node: str) -> None:
        group = self._group_of(node)
        _name, bundle = self._known.nodes.pop(node)
        if group is not None:
            group.taken.pop(bundle, None)
        self._known.starting.discard(node)
        self._known.prune_places()
        self._unwanted.discard(node)
        self._actors.pop(node, None)
        self._places.pop(node, None)
        self._topology.pop(node, None)

    def _group_of(self, node: str) -> PlacementGroupHandle | None:
        return self._rooms.groups.get(self._known.nodes[node][0])

    async def _look(self) -> None:
        """Tell of the nodes whose Ray node has ended."""
        if not self._places:
            return
        dead = await ray_nodes.ended(set(self._places.values()))
        self._rooms.dead |= dead
        for node in [node for node, place in self._places.items() if place in dead]:
            if node in self._actors:
                await self._kill(self._actors[node])
            await self._ended(node, f"its Ray node {self._places.get(node, '')[:8]} is gone")

    async def _end_everything(self) -> None:
        async with self._lock:  # whoever starts nodes has finished, and no one starts more
            self._missing = 0
        self._unwanted |= self._known.nodes.keys() - self._actors.keys()
        await asyncio.gather(*(self._end(actor) for actor in list(self._actors.values())))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + END_S
        while self._known.nodes and loop.time() < give_up:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up):
                    await self._news.wait()
        for group in list(self._rooms.groups.values()):
            await self._rooms.remove(group)  # takes whatever actor is left with it
        # Also those that were made while the head did not answer, or not removed then.
        await patiently(
            lambda: placement_groups.remove_all(self._job.name), "removing placement groups"
        )
        self._known.nodes.clear()
        await self._save()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the Ray backend failed", exc_info=error)
