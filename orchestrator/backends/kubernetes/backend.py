"""The nodes of one job as pods of a cluster.

Owns: creating, deleting and watching the job's pods; saying why one ended or does not start. Must
not: talk to agents; they dial in by themselves.

A pod is a node of the job, its name is never used again. All jobs share one watch (feed.py). A pod
that Kubernetes cannot confirm to have ended (its node is silent) is deleted, but removed by force
only when abandoned.py finds that safe: what it runs is fenced by the generation anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError
from holdfast.orchestrator.kube.informer import Backoff, Change
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol.facts import NodeFacts

from ..base import NodeGone, NoRoom, Starts
from ..topology import coordinates
from . import pod_conditions
from .gang_arbiter import GangArbiter, GangPriority
from .node_informer import NodeInformer
from .pod_creation import CreatedPods, make
from .pod_deletion import PodDeletion
from .pod_informer import PodInformer
from .pod_tracker import PodTracker, Refusal
from .pods import PodSettings, pod_document
from .queues.admission import Admission
from .startup_timeouts import StartupTimeouts

AT_ONCE = 16
"""Requests of one job under way: the API server is there for others too."""
BACK_OFF_MIN_S = 5.0
BACK_OFF_MAX_S = 300.0
END_S = 10.0
"""So long the agents of a finished job may take to end by themselves; then their pods are deleted.
Those that ended stay until the job is deleted: `kubectl logs` still answers."""
START_LIMIT_S = 1800.0
"""A pod that fails to start is judged by starting.py, sooner. One that pulls a large image for long
is not late: elsewhere it would have to begin anew."""
SETTLE_S = 0.05
"""Changes come in swarms; what they add up to is looked at once."""

log = logging.getLogger("holdfast.kubernetes")


@dataclass
class OperatorContext:
    """What the backends of all jobs of an operator share."""

    cluster: KubeClient
    pod_informer: PodInformer
    node_informer: NodeInformer
    gangs: GangArbiter
    settings: PodSettings


class KubernetesBackend:
    """Implements backends.base.Backend."""

    def __init__(
        self,
        job: TrainingJob,
        owner: Owner,
        shared: OperatorContext,
        *,
        created: str = "",
        on_notice: Callable[[str, str], None] = lambda node, detail: None,
        on_change: Callable[[], None] = lambda: None,
        ensure_secret: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`on_notice(node, detail)`: Kubernetes will take a node away, and says why. `on_change`:
        `problems()` may say something else now. `ensure_secret`: called before pods are made."""
        self._job, self._owner, self._shared = job, owner, shared
        self._cluster = shared.cluster
        self._key = (owner.namespace, owner.name)
        self.queue = Admission(job, owner, shared.cluster)
        self._starting = StartupTimeouts(
            GangPriority(-job.spec.priority, created, owner.key),
            job.spec.nodes.min,
            job.spec.kubernetes.start_timeout_s,
            shared.gangs,
        )
        self._on_notice, self._on_change = on_notice, on_change
        self._ensure_secret = ensure_secret
        self._on_node_gone: Callable[[NodeGone], None] = lambda gone: None
        self._known = PodTracker()
        self._refusal = Refusal()
        self._pauses = Backoff(BACK_OFF_MIN_S, BACK_OFF_MAX_S)
        self._undone = Backoff(BACK_OFF_MIN_S, BACK_OFF_MAX_S)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._removal = PodDeletion(shared.cluster, owner.namespace, self._slots)
        self._open = self._closing = self._looking = False
        self._news = asyncio.Event()

    # -- the contract --------------------------------------------------------------------------
    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self._on_node_gone = on_node_gone
        await self._shared.pod_informer.synced()
        for pod in self._pods().values():
            self._learn(pod)
            if pod_conditions.has_trained(pod):
                self._known.trained.add(pod["metadata"]["name"])
            if pod_conditions.is_over(pod):
                self._known.told.add(pod["metadata"]["name"])
        self.queue.opened(self._pods())
        self._shared.pod_informer.subscribe(self._key, self._changed)
        self._open = True
        self._look()

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        """Behind a queue it lasts until some are admitted: they are no nodes before."""
        self._refuse_too_early()
        while True:
            changed = self.queue.changed
            await self._removal.once(self.queue.spent(self._pods()))
            plan = self.queue.plan(count, self._pods(), self._known.creating)
            made = await self._make(plan.create, avoid) if plan.create else ()
            if plan.ready or not plan.held:
                return plan.ready or made
            await changed.wait()

    async def follow(self, job: TrainingJob) -> None:
        """Its size may be another one, or it is held, or its pods get another grace from now on.
        Raises ApiError."""
        if job.spec.nodes != self._job.spec.nodes:
            self._undone.reset()
            if self._refusal.of_size:
                self._refusal = Refusal()  # another size may fit
        self._job, self._starting.needed = job, job.spec.nodes.min
        self.queue.follow(job)
        if self._open:
            self._look()
        await self._removal.once(self.queue.unwanted(self._pods()))

    async def _make(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        blamed = self._known.blamed(avoid, self._pods())
        nodes = tuple(names.new_node_name(self._owner.name) for _ in range(count))
        self._known.creating.update(nodes)
        try:
            if self._ensure_secret is not None:
                await self._ensure_secret()
            pods = [self._document(node, blamed, index) for index, node in enumerate(nodes)]
            await self.queue.ensure(pods[0], self._pods())
        except HoldfastError as error:
            self._known.creating.difference_update(nodes)
            raise self._no_room(count, error) from None
        made = await make(self._cluster, self._owner.namespace, pods, self._slots)
        if made.refusal is not None:
            return await self._make_do(nodes, made, made.refusal)
        self._refusal = Refusal()
        self._undone.reset()
        self._on_change()
        return nodes

    async def _make_do(
        self, nodes: tuple[str, ...], made: CreatedPods, refusal: ApiError
    ) -> tuple[str, ...]:
        """With the pods of a request that were made, where the job can train with them; else they
        would only take room from others."""
        kept = made.there
        # Those whose answer did not come may have been made all the same.
        self._known.creating.difference_update(set(nodes) - set(kept))
        self._known.told.update(made.unknown)
        if kept and len(self._known.here(self._pods())) >= self._job.spec.nodes.min:
            self._spawn(self._removal.surely(made.unknown))
            self._undone.reset()
            self._no_room(len(nodes), refusal, len(kept))
            return tuple(kept)
        self._known.creating.difference_update(kept)
        self._known.told.update(kept)
        self._spawn(self._removal.surely((*kept, *made.unknown)))
        raise self._no_room(len(nodes), refusal, pause_s=self._undone.next_s() if kept else 0.0)

    async def release_node(self, node: str) -> None:
        self._known.creating.discard(node)
        self._known.released.add(node)
        pod = self._pods().get(node)
        if pod is None or not pod_conditions.is_leaving(pod):
            await self._removal.once((node,))

    async def list_nodes(self) -> tuple[str, ...]:
        alive = {name: pod for name, pod in self._pods().items() if not pod_conditions.is_over(pod)}
        there = {name for name, pod in alive.items() if not self.queue.is_held(pod)}
        return tuple(sorted(there | self._known.creating))

    def starts(self) -> Starts:
        return Starts(limit_s=START_LIMIT_S)

    async def close(self, *, release: bool) -> None:
        self._closing = True
        self.queue.stop()
        self._starting.leave()
        if release and self._open:
            await self._end_all()
        if self._timer is not None:
            self._timer.cancel()
        if self._open:
            self._shared.pod_informer.unsubscribe(self._key)
            self._open = False
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- beside the contract -------------------------------------------------------------------
    def withhold(self, seconds: float) -> None:
        """Rehearsal: have no room for this long."""
        self._hold_off(seconds, f"replacements are withheld for {seconds:g} s (rehearsal)")

    def problems(self) -> list[pod_conditions.PodProblem]:
        """Why pods do not start, or could not even be made; the same only once."""
        found = [
            self.queue.trouble(pod) or pod_conditions.trouble(pod) for pod in self._pods().values()
        ]
        if said := self._refusal.text(asyncio.get_running_loop().time()):
            found.append(pod_conditions.PodProblem(self._refusal.code, said))
        return list(dict.fromkeys(one for one in found if one is not None))

    def facts_of(self, node: str, facts: NodeFacts) -> NodeFacts:
        """What an agent says of its node, with what Kubernetes knows better: where it is."""
        place = self._known.place.get(node, "")
        if not place:
            return facts
        labels = self._shared.node_informer.labels(place)
        keys = self._job.spec.kubernetes.topology_keys
        topology = (*coordinates(labels, keys), place)
        return msgspec.structs.replace(facts, failure_domain=place, topology=topology)

    def label(self, generation: int, ranks: Mapping[str, int]) -> None:
        """Write generation and lowest rank on the pods that train; take them off the others. Called
        when a generation has finished its first step."""
        self._known.trained.update(ranks)
        for name, pod in self._pods().items():
            rank = ranks.get(name)
            wanted = {
                names.LABEL_RANK: None if rank is None else str(rank),
                names.LABEL_GENERATION: None if rank is None else str(generation),
            }
            have = pod["metadata"].get("labels", {})
            if pod_conditions.is_over(pod) or all(
                have.get(key) == value for key, value in wanted.items()
            ):
                continue
            self._spawn(self._patch(name, {"metadata": {"labels": wanted}}))

    # -- making pods ---------------------------------------------------------------------------
    def _refuse_too_early(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if left_s := self._refusal.left_s(now_s):
            raise NoRoom(f"{self._refusal.text(now_s)}; asking again in {left_s:.0f} s")
        if ahead := self._starting.blocked_by():
            text = f"waiting for room; job {ahead} came first and has not enough either"
            self._hold_off(0.0, text)
            raise NoRoom(text)

    def _document(self, node: str, blamed: Mapping[str, str], index: int) -> Document:
        settings, doubtful = self._shared.settings, self._known.doubtful(self._pods())
        pod = pod_document(self._job, self._owner, settings, node, blamed, doubtful)
        return self.queue.decorate(pod, self._pods(), index)

    def _no_room(
        self, count: int, error: HoldfastError, made: int = 0, pause_s: float = 0.0
    ) -> NoRoom:
        until_s = asyncio.get_running_loop().time() + pause_s
        self._refusal = Refusal.of(count, error, until_s, made)
        self._on_change()
        return NoRoom(self._refusal.why)

    def _hold_off(self, seconds: float, why: str) -> None:
        self._refusal = Refusal(why, asyncio.get_running_loop().time() + seconds)
        self._on_change()

    # -- what happens to pods ------------------------------------------------------------------
    def _pods(self) -> dict[str, Document]:
        return {
            name: pod
            for name, pod in self._shared.pod_informer.pods(self._key).items()
            if self._is_ours(pod)
        }

    def _is_ours(self, pod: Document) -> bool:
        """A job of the same name that was deleted may have left pods."""
        references = pod["metadata"].get("ownerReferences") or ()
        return any(one.get("uid") == self._owner.uid for one in references)

    def _changed(self, change: Change, pod: Document) -> None:
        if not self._is_ours(pod):
            return
        name = pod["metadata"]["name"]
        self._learn(pod)
        if change == "DELETED":
            self._tell(name, pod_conditions.end(pod, deleted=True))
        elif pod_conditions.is_over(pod):
            self._tell(name, pod_conditions.end(pod))
        elif change == "ADDED" and name not in self._known.creating:
            # The answer to its creation did not come, and its request has failed since.
            self._known.told.add(name)
            self._spawn(self._removal.once((name,)))
        else:
            self._notice(name, pod)
        self._known.creating.discard(name)
        if pod_conditions.is_running(pod):
            self._pauses.reset()
        self._news.set()
        self.queue.wake()
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(SETTLE_S, self._look)

    def _learn(self, pod: Document) -> None:
        name, place = pod["metadata"]["name"], pod_conditions.place(pod)
        if place and self._known.place.get(name) != place:
            self._known.place[name] = place
            self._spawn(self._shared.node_informer.learn(place))

    def _notice(self, name: str, pod: Document) -> None:
        if name in self._known.noticed | self._known.released or self._closing:
            return
        detail = pod_conditions.disruption(pod)
        if not detail and pod_conditions.is_leaving(pod):
            detail = "its pod is being deleted"
        if detail:
            self._known.noticed.add(name)
            self._on_notice(name, detail)

    def _tell(self, name: str, detail: str) -> None:
        if name in self._known.told:
            return
        self._known.told.add(name)
        if not self._closing:
            log.info("%s: %s", name, detail, extra={"job": self._owner.key})
            self._on_node_gone(NodeGone(name, detail))

    # -- pods that do not start ----------------------------------------------------------------
    def _look(self) -> None:
        """After every change, and when a time limit of starting.py is due."""
        self._looking = False
        if self._closing:
            return
        now_s = asyncio.get_running_loop().time()
        before = set(self._starting.troubled)
        told, waits = self._known.told, self.queue.waits
        pods = {n: pod for n, pod in self._pods().items() if n not in told and not waits(pod)}
        decision = self._starting.look(now_s, pods, self._known.trained)
        for name, why in decision.give_back.items():
            self._tell(name, why)
        if decision.give_back:
            self._spawn(self._removal.surely(decision.give_back))
        if decision.hold_off:
            self._hold_off(self._pauses.next_s(), decision.hold_off)
        if set(self._starting.troubled) != before:
            self._on_change()
        self._wake_at(decision.due_s, now_s)

    def _wake_at(self, due_s: float | None, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.05, due_s - now_s), self._look) if due_s else None

    # -- ending pods ---------------------------------------------------------------------------
    async def _end_all(self) -> None:
        """At the end of the job. Raises ApiError."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + END_S
        while loop.time() < give_up:
            running = [name for name, pod in self._pods().items() if pod_conditions.is_running(pod)]
            if not running:
                break
            self._news.clear()
            try:
                async with asyncio.timeout_at(give_up):
                    await self._news.wait()
            except TimeoutError:
                break
        await asyncio.gather(*starmap(self._patch, self.queue.last_patches(self._pods()).items()))
        left = [name for name, pod in self._pods().items() if not pod_conditions.is_over(pod)]
        await self._removal.once({*left, *self._known.creating})

    async def _patch(self, name: str, body: Document) -> None:
        async with self._slots:
            await self._cluster.patch(PODS, self._owner.namespace, name, body)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("%s", error, extra={"job": self._owner.key})
