"""A transcript of one job: a test applies events at chosen times and checks the actions.

Nothing happens that the test does not apply. Every event is recorded, and `replayed()` gives them
to a second controller. After each event `check_timers` compares the timers with the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.orchestrator.core import invariants
from holdfast.orchestrator.core.actions import (
    Action,
    AnyAction,
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.controller import _TIMERS, Controller
from holdfast.orchestrator.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnyEvent,
    FromNode,
    JobSubmitted,
    NodeLost,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.state import JobState, TimerName
from holdfast.orchestrator.protocol.facts import Exit, NodeFacts, ShardFile, Stack, StagedShard
from holdfast.orchestrator.protocol.manifest import shard_file_name
from holdfast.orchestrator.protocol.messages import (
    GroupStopped,
    NodeJoined,
    ShardPersisted,
    StandbysReported,
    WorkerExited,
)
from tests.documents import job_document

SECOND = 1_000_000_000
A = TypeVar("A", bound=Action)


def spec(
    nodes: dict[str, int] | None = None,
    workers: int = 2,
    shard: int | str = 2,
    *,
    script: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A job document. Sections in `more` (recovery, checkpoint ...) replace the empty ones."""
    entry = {"script": "train.py"} if script else {"recipe": {"name": "pretrain"}}
    return job_document(
        "tale",
        {
            "entrypoint": entry,
            "nodes": nodes or {"min": 1, "max": 2},
            "workersPerNode": workers,
            "parallelism": {"shard": shard},
            **more,
        },
    )


def facts(name: str, workers: int = 2, **more: Any) -> NodeFacts:
    return NodeFacts(hostname=name, address=f"ip-{name}", data_port=7000, slots=workers, **more)


@dataclass
class Transcript:
    document: dict[str, Any] = field(default_factory=spec)
    controller: Controller = field(default_factory=Controller)
    now_ns: int = 1_000 * SECOND
    journal: list[tuple[int, AnyEvent]] = field(default_factory=list)
    actions: list[AnyAction] = field(default_factory=list)
    """All actions decided so far."""
    fresh: list[AnyAction] = field(default_factory=list)
    """Actions decided by the last event."""
    ports: int = 40_000

    @property
    def state(self) -> JobState:
        return self.controller.state

    # -- events -------------------------------------------------------------------------------
    def apply(self, event: AnyEvent) -> list[AnyAction]:
        self.journal.append((self.now_ns, event))
        self.fresh = list(self.controller.step(self.now_ns, event))
        check_timers(self.state)
        invariants.check(self.state)
        self.actions += self.fresh
        return self.fresh

    def submit(self) -> list[AnyAction]:
        return self.apply(JobSubmitted(job_id="job-1", spec=self.document, spec_directory="."))

    def join(self, *names: str, standbys_ready: bool = True, **more: Any) -> list[AnyAction]:
        workers = self.state.job.spec.workers_per_node
        seen: list[AnyAction] = []
        for name in names:
            self.ports += 1
            known = more.pop("facts", None) or facts(name, workers)
            seen += self.apply(
                FromNode(name, NodeJoined(facts=known, offered_port=self.ports, **more))
            )
            if standbys_ready:
                seen += self.apply(FromNode(name, StandbysReported(ready=True)))
        self.fresh = seen
        return seen

    def wait(self, seconds: float) -> list[AnyAction]:
        """Time passes; every timer that becomes due is a Tick."""
        until, seen = self.now_ns + round(seconds * SECOND), []
        while (due := self.controller.next_deadline_ns()) is not None and due <= until:
            self.now_ns = max(self.now_ns, due)
            seen += self.apply(Tick())
        self.now_ns = until
        self.fresh = seen
        return seen

    def succeed(self, *kinds: type[Action]) -> list[AnyAction]:
        """Every action of these kinds without a result succeeds."""
        seen: list[AnyAction] = []
        for action in list(self.state.inflight.values()):
            if isinstance(action, kinds):
                seen += self.apply(ActionSucceeded(action_id=action.action_id))
        self.fresh = seen
        return seen

    def fail(self, action: Action, detail: str = "no room") -> list[AnyAction]:
        return self.apply(ActionFailed(action_id=action.action_id, detail=detail))

    def step(self, number: int, generation: int | None = None) -> list[AnyAction]:
        chosen = self.state.generation if generation is None else generation
        return self.apply(StepCompleted(generation=chosen, step=number, step_s=0.4))

    def exits(self, rank: int, **how: Any) -> list[AnyAction]:
        node = self.state.node_of(rank)
        how = how or {"code": 0}
        generation = how.pop("generation", self.state.generation)
        return self.apply(
            FromNode(node, WorkerExited(generation=generation, exit=Exit(rank=rank, **how)))
        )

    def lose(self, node: str, cause: Any = "gone", detail: str = "") -> list[AnyAction]:
        return self.apply(NodeLost(node=node, cause=cause, detail=detail))

    def stopped(
        self, node: str, step: int | None = None, exits: tuple[Exit, ...] = (), **more: Any
    ) -> list[AnyAction]:
        """A member has stopped; its memory holds all its shards of `step` and of the one before."""
        stop = self.state.stop
        assert stop is not None and node in stop.waiting, f"{node} was not asked to stop"
        staged = more.pop("staged", None)
        if staged is None:
            staged = self.inventory(node, step) if step is not None else ()
        self.ports += 1
        return self.apply(
            FromNode(
                node,
                GroupStopped(
                    action_id=stop.waiting[node],
                    generation=self.state.generation,
                    staged=staged,
                    exits=exits,
                    offered_port=self.ports,
                    **more,
                ),
            )
        )

    def all_stopped(self, step: int | None = None) -> list[AnyAction]:
        """Every member that was asked to stop has stopped."""
        seen: list[AnyAction] = []
        stop = self.state.stop
        for node in list(stop.waiting) if stop else []:
            seen += self.stopped(node, step)
        self.fresh = seen
        return seen

    def inventory(self, node: str, step: int) -> tuple[StagedShard, ...]:
        mesh = self.state.mesh
        assert mesh is not None
        return tuple(
            StagedShard(at, self.state.generation, seat.shard, mesh.num_shards, 100)
            for at in (step - 1, step)
            if at >= 0
            for seat in self.state.group.launches[node].seats
        )

    def persisted(self, step: int, shard: int, **more: Any) -> list[AnyAction]:
        generation = more.pop("generation", self.state.generation)
        whole = self.state.meshes[self.state.generation].num_shards
        num_shards = more.pop("num_shards", whole)
        name = shard_file_name(shard, num_shards)
        file = ShardFile(step, generation, shard, num_shards, name, 100, "c0ffee")
        return self.apply(FromNode("n", ShardPersisted(generation=generation, shard=file)))

    def written(self, step: int) -> None:
        for shard in range(self.state.meshes[self.state.generation].num_shards):
            self.persisted(step, shard)

    def commit(self, step: int) -> list[AnyAction]:
        """All shards of a step become durable, then its manifest."""
        self.written(step)
        return self.succeed(CommitManifest)

    # -- common beginnings --------------------------------------------------------------------
    def started(self, *names: str, step: int | None = 0) -> Transcript:
        """Submitted, all nodes joined, launched and (step given) training."""
        self.submit()
        self.succeed(RequestNodes)
        self.join(*(names or ("a", "b")))
        self.succeed(LaunchGroup)
        if step is not None:
            self.step(step)
        return self

    # -- decisions ----------------------------------------------------------------------------
    def of(self, kind: type[A]) -> list[A]:
        """Actions of this kind that the last event decided."""
        return [action for action in self.fresh if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        found = self.of(kind)
        assert len(found) == 1, f"{len(found)} {kind.__name__} in {self.fresh}"
        return found[0]

    def all(self, kind: type[A]) -> list[A]:
        """All actions of a kind, since the submission."""
        return [action for action in self.actions if isinstance(action, kind)]

    def one_reason(self, kind: type[A]) -> str:
        """The reason of the first action of this kind that the last event decided."""
        return self.of(kind)[0].reason.text

    def last(self, kind: type[A]) -> A:
        return [action for action in self.actions if isinstance(action, kind)][-1]

    def replayed(self) -> Controller:
        again = Controller()
        for now_ns, event in self.journal:
            again.step(now_ns, event)
        return again


def check_timers(state: JobState) -> None:
    """A timer runs only while what it belongs to lasts."""
    running = state.group.active and state.stop is None
    waits = not state.terminal and state.phase != "suspended"
    last_write = state.drain is not None and state.drain.kind != "at-risk"
    allowed: dict[TimerName, bool] = {
        "gather": state.needs_placement,
        "storage": waits,
        "replacement": waits,
        "capacity": state.needs_placement,
        "grow": running,
        "standbys": running,
        "join": running,
        "preempt": running,
        "launch": running and bool(state.group.launching),
        "launch-again": running and bool(state.group.launching),
        "cadence": running,
        "stop": state.stop is not None,
        "stage": running,
        "persist": last_write,
        "drain": state.drain is not None,
        "commit": not state.terminal,
        "request": not state.terminal,
        "expect": not state.terminal,
        "release": bool(state.supply.unreleased),
        "rejoin": waits and not all(node.confirmed for node in state.nodes.values()),
        "deadline": waits and state.intent != "deadline",
        "finish": state.terminal and state.finish_action is not None,
    }
    stale = [name for name in state.timers if not allowed[name]]
    acted_on = dict.fromkeys(name for name, _act in _TIMERS)
    if state.intent != "run":
        del acted_on["deadline"]  # it is kept for a job that is resumed
    stale += [n for n, at in state.timers.items() if n in acted_on and at <= state.now_ns]
    assert not stale, f"timers {stale} run in phase {state.phase}: {state.reason.text}"


def stack(rank: int, in_collective: bool = False) -> Stack:
    return Stack(rank=rank, text=f"stack of {rank}", in_collective=in_collective)


__all__ = [
    "SECOND",
    "CommitManifest",
    "FinishJob",
    "LaunchGroup",
    "PersistStep",
    "ReleaseNode",
    "RequestNodes",
    "StopGroup",
    "Transcript",
    "facts",
    "spec",
    "stack",
]
