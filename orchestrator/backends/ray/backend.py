"""Implements backends.base.Backend: the nodes of one job as actors of a Ray cluster.

A node's end is reported by a call that waits inside the node's actor: it returns when the agent's
process has ended, and fails when the actor or its Ray node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.orchestrator import tasks
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.certificate import TlsKeyPair
from holdfast.orchestrator.protocol.facts import NodeFacts

from ..base import NodeGone, NoRoom, Starts, Withholding
from . import actors, placement, ray_nodes
from .actors import until_head_answers
from .agent import AgentOrder
from .drains import Drains, NoticeSink, RayNodeLookup, draining
from .kv import JobKeyValueStore, RayNodeRegistry, RegistryWriter
from .placement import Bundle, GangPlacement, GroupApi, PlacementGroupHandle, PlacementTiming

log = logging.getLogger("holdfast.ray")


@dataclass(frozen=True)
class RayBackendTiming:
    answer_s: float = 1.0
    """An actor whose connection broke and that does not answer within this has ended."""
    end_s: float = 10.0
    """Seconds for all actors to end when the job has."""
    placement: PlacementTiming = field(default_factory=PlacementTiming)


def end_without_controller(job: str) -> None:
    """SIGKILL for the controller and the agents with their workers, and remove their placement
    groups. Takes no checkpoint: only for jobs whose controller does not answer."""
    actors.kill_all(job)
    placement.remove_all(job)


class RayBackend(Withholding):
    def __init__(
        self,
        job: TrainingJob,
        job_id: str,
        store: JobKeyValueStore,
        keys: TlsKeyPair,
        *,
        on_notice: NoticeSink = lambda node, detail, grace_s: None,
        groups: GroupApi | None = None,
        find_agent: Callable[[str, str], Any] = actors.find_agent,
        drain_source: Callable[[], dict[str, int]] = draining,
        timing: RayBackendTiming | None = None,
    ) -> None:
        """`on_notice`: Ray will take a node away. `groups`, `find_agent` and `drain_source` call
        the cluster."""
        self._job, self._job_id, self._keys = job, job_id, keys
        self._timing = timing or RayBackendTiming()
        self._find_agent = find_agent
        self._registry_writer = RegistryWriter(store)
        self._registry = RayNodeRegistry()
        self._bundle = placement.bundle_of(job)
        self._tasks = tasks.TaskSet(
            lambda error: log.error("a task of the Ray backend failed", exc_info=error)
        )
        self._placement = GangPlacement(
            groups or placement.RayGroups(job.name, self._bundle, job.spec.ray.label_selector),
            job.spec.nodes.min,
            self._next_name,
            self._tasks.start,
            self._on_placed,
            self._timing.placement,
        )
        self._actors: dict[str, Any] = {}
        self._ray_nodes: dict[str, str] = {}
        """Node -> Ray node, of nodes whose actor is up."""
        self._topology: dict[str, tuple[str, ...]] = {}
        lookup = RayNodeLookup(self._ray_nodes, self._actors)
        self._drains = Drains(lookup, on_notice, drain_source)
        self._unsaved: set[str] = set()
        """Nodes that are not in the stored registry yet: they do not exist for callers."""
        self._unclaimed: list[str] = []
        """Nodes that were started when room was found for an earlier request."""
        self._missing = 0
        """Nodes of the last request without a place; they stay requested of the cluster."""
        self._avoided: set[str] = set()
        """Ray nodes of cordoned nodes."""
        self._release_at_start: set[str] = set()
        """Nodes that were released before their actor existed."""
        self._address, self._port = "127.0.0.1", 0
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._lock = asyncio.Lock()
        self._node_ended = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closing = False

    # -- Backend -------------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        self._registry = await self._registry_writer.load()
        await self._placement.adopt(self._registry.groups, self._registry.nodes)
        for node in list(self._registry.nodes):
            actor = await asyncio.to_thread(self._find_agent, self._job.name, node)
            if actor is not None:
                self._adopt(node, actor)
            elif node in self._registry.starting and self._group_of(node) is not None:
                self._tasks.start(self._start_actor(node))
            else:
                self._forget(node)
        await self._placement.remove_empty()
        await self._save()
        self._tasks.start(self._drains.watch())

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        self.expect_room()
        async with self._lock:
            granted = [node for node in self._unclaimed if node in self._registry.nodes][:count]
            self._unclaimed = [node for node in self._unclaimed if node not in granted]
            ray_node_of = self._registry.ray_nodes
            self._avoided = {ray_node_of[node] for node in avoid if node in ray_node_of}
            self._missing = count - len(granted)
            granted += await self._fill(wait=True)
            if not granted:
                selector = self._job.spec.ray.label_selector
                raise NoRoom(
                    await asyncio.to_thread(
                        ray_nodes.capacity_report, count, self._bundle, selector
                    )
                )
            return tuple(granted)

    async def release_node(self, node: str) -> None:
        if node not in self._registry.nodes:
            return
        actor = self._actors.get(node)
        if actor is not None:
            self._tasks.start(self._end(actor))
        else:
            self._release_at_start.add(node)

    async def list_nodes(self) -> tuple[str, ...]:
        # The core calls this when an agent's connection has closed. Ray's head takes seconds to
        # notice a lost machine, so the raylets are probed here.
        if self._probing is None or self._probing.done():
            self._probing = self._tasks.start(self._probe_ray_nodes())
        await asyncio.wait([self._probing])
        return tuple(sorted(self._registry.nodes.keys() - self._unsaved))

    def starts(self) -> Starts:
        return Starts()

    async def close(self, *, release: bool) -> None:
        self._closing = True
        if release:
            await self._release_all()
        if self._cleaning is not None:
            await asyncio.wait([self._cleaning], timeout=self._timing.end_s)
        await tasks.end(self._tasks)
        await self._registry_writer.flush()

    # -- further capabilities ------------------------------------------------------------------
    def facts_of(self, node: str, facts: NodeFacts) -> NodeFacts:
        """An agent's facts, with the topology that Ray knows."""
        self._drains.joined(node)
        return msgspec.structs.replace(facts, topology=self._topology.get(node, ()))

    def set_endpoint(self, address: str, port: int) -> None:
        """Set the address of the controller; running agents are notified."""
        self._address, self._port = address, port
        for actor in self._actors.values():
            actor.set_endpoint.remote(address, port)

    async def trim(self, wanted: Callable[[], int]) -> None:
        """Request no more than `wanted()` further nodes of the cluster. It is called under the
        lock, after a request that may be running."""
        async with self._lock:
            before, self._missing = self._missing, min(self._missing, wanted())
            if self._missing < before:
                try:
                    self._unclaimed += await self._fill(wait=False)
                except BaseException:
                    self._missing = before  # so that it is tried again
                    raise

    # -- placement -----------------------------------------------------------------------------
    async def _fill(self, *, wait: bool) -> list[str]:
        """Start as many missing nodes as have room now; the rest stays requested."""
        if self._closing:
            return []
        excluded = frozenset(self._drains.ray_nodes.keys() | self._avoided)
        bundles = await self._placement.serve(self._missing, excluded, wait=wait)
        started = await self._start(bundles)
        self._missing -= len(started)
        return started

    def _on_placed(self) -> None:
        if self._serving is None or self._serving.done():
            self._serving = self._tasks.start(self._serve_pending())

    async def _serve_pending(self) -> None:
        """Room was found for an earlier request: start its nodes."""
        async with self._lock:
            self._serving = None  # a group that is placed from now on needs another run
            self._unclaimed += await self._fill(wait=False)

    async def _start(self, bundles: list[Bundle]) -> list[str]:
        started = []
        for group, bundle in bundles:
            node = group.name.rpartition("/")[2]
            if group.name_used or bundle:
                node = self._next_name()
            group.name_used = True
            group.nodes[bundle] = node
            self._registry.nodes[node] = (group.name, bundle)
            self._registry.starting.add(node)
            started.append(node)
        self._unsaved |= set(started)
        try:
            if started:
                await self._save()  # first: a node that is not in the store must not exist
        except BaseException:
            for node in started:
                self._forget(node)
            raise
        finally:
            self._unsaved -= set(started)
        for node in started:
            self._tasks.start(self._start_actor(node))
        return started

    def _next_name(self) -> str:
        """The next name of a node, or of a group, whether a node uses the name or not."""
        self._registry.next_number += 1
        return f"node-{self._registry.next_number - 1}"

    async def _save(self) -> None:
        groups = self._placement.groups.values()
        self._registry.groups = {group.name: group.size for group in groups if group.nodes}
        await self._registry_writer.save()

    # -- actors --------------------------------------------------------------------------------
    async def _start_actor(self, node: str) -> None:
        if node not in self._registry.nodes:
            return
        group, (_, bundle) = self._group_of(node), self._registry.nodes[node]
        assert group is not None
        order = AgentOrder(
            job=self._job.name,
            node=node,
            slots=self._job.spec.workers_per_node,
            job_id=self._job_id,
            token=self._keys.token,
            key=self._keys.key,
            certificate=self._keys.certificate,
            address=self._address,
            port=self._port,
            env=dict(self._job.spec.env),
        )
        try:
            actor = await until_head_answers(
                lambda: actors.start_agent(order, group.handle, bundle, self._bundle),
                f"starting {node}",
            )
        except Exception as error:  # the head has not answered for long
            await self._ended(node, f"its actor was not started ({actors.first_line(error)})")
            return
        if node not in self._registry.nodes:
            await self._kill(actor)
            return
        self._adopt(node, actor)
        if node in self._release_at_start:
            await self._end(actor)

    def _adopt(self, node: str, actor: Any) -> None:
        self._actors[node] = actor
        actor.set_endpoint.remote(self._address, self._port)
        self._tasks.start(self._locate(node, actor))
        self._tasks.start(self._watch(node, actor))

    async def _locate(self, node: str, actor: Any) -> None:
        from ray.exceptions import RayError

        try:
            facts = await actor.facts.remote()
        except RayError:
            return  # _watch reports why
        ray_node = str(facts["ray_node"])
        self._ray_nodes[node] = self._registry.ray_nodes[node] = ray_node
        self._registry.starting.discard(node)
        await self._save()
        keys = self._job.spec.ray.topology_keys
        self._topology[node] = await ray_nodes.topology(ray_node, keys)

    async def _watch(self, node: str, actor: Any) -> None:
        detail = await actors.agent_end(actor, self._timing.answer_s)
        await self._kill(actor)
        await self._ended(node, detail)

    async def _kill(self, actor: Any) -> None:
        """Kill the actor; if the head does not answer, the removal of the group does."""
        try:
            await asyncio.to_thread(actors.kill, actor)
        except Exception as error:  # Ray's own RpcError or a plain RuntimeError
            log.warning("an actor was not killed: %s", error)

    async def _end(self, actor: Any) -> None:
        """End the agent before its actor: the report of its end means that its processes ended."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(self._timing.answer_s):
                await actor.end.remote()
        await self._kill(actor)

    async def _ended(self, node: str, detail: str) -> None:
        if node not in self._registry.nodes:
            return
        group = self._group_of(node)
        self._forget(node)
        self._node_ended.set()
        if not self._closing:
            log.info("%s: %s", node, detail, extra={"job": self._job.name})
            # At once: a recovery waits for it.
            self._on_node_gone(NodeGone(node, detail))
        # Also when this controller ends now: an empty group must not hold room.
        self._cleaning = self._tasks.start(self._clean_up(group))
        await asyncio.shield(self._cleaning)

    async def _clean_up(self, group: PlacementGroupHandle | None) -> None:
        if group is not None and not group.nodes:
            await self._placement.remove(group)
        await self._save()

    def _forget(self, node: str) -> None:
        group = self._group_of(node)
        _name, bundle = self._registry.nodes.pop(node)
        if group is not None:
            group.nodes.pop(bundle, None)
        self._registry.starting.discard(node)
        self._registry.prune_ended()
        self._release_at_start.discard(node)
        self._actors.pop(node, None)
        self._ray_nodes.pop(node, None)
        self._topology.pop(node, None)

    def _group_of(self, node: str) -> PlacementGroupHandle | None:
        return self._placement.groups.get(self._registry.nodes[node][0])

    async def _probe_ray_nodes(self) -> None:
        """Report the nodes whose Ray node has ended."""
        if not self._ray_nodes:
            return
        dead = await ray_nodes.dead(set(self._ray_nodes.values()))
        self._placement.dead |= dead
        for node in [node for node, ray_node in self._ray_nodes.items() if ray_node in dead]:
            if node in self._actors:
                await self._kill(self._actors[node])
            await self._ended(node, f"its Ray node {self._ray_nodes.get(node, '')[:8]} is gone")

    async def _release_all(self) -> None:
        async with self._lock:  # no more nodes are started from here on
            self._missing = 0
        self._release_at_start |= self._registry.nodes.keys() - self._actors.keys()
        await asyncio.gather(*(self._end(actor) for actor in list(self._actors.values())))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.end_s):
                while self._registry.nodes:
                    self._node_ended.clear()
                    await self._node_ended.wait()
        for group in list(self._placement.groups.values()):
            await self._placement.remove(group)  # with its actor, if one is left
        # Also groups that were made, or not removed, while the head did not answer.
        await until_head_answers(
            lambda: placement.remove_all(self._job.name), "removing placement groups"
        )
        self._registry.nodes.clear()
        await self._save()
