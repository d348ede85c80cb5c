"""A job of four ranks on two nodes whose heartbeats a test sends, and its progress monitor."""

from __future__ import annotations

from typing import Any, Self

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import (
    AnyEvent,
    FromNode,
    HangDetected,
    HangSuspected,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.progress_monitor import ProgressMonitor
from holdfast.orchestrator.protocol.facts import Stack, WorkerBeat
from holdfast.orchestrator.protocol.messages import GroupInspected, Heartbeat, NodeJoined

from .harness import SECOND, Transcript, facts, spec

NODES, WORKERS = 64, 8
NAMES = [f"n{number}" for number in range(NODES)]


class Watch:
    """A job of four ranks on two nodes; a test sends the heartbeats."""

    def __init__(self, **document: Any) -> None:
        self.job = Transcript(spec(**document)).started(step=None)
        self.monitor = ProgressMonitor(self.job.state.job, self.job.controller)
        self.verdicts: list[AnyEvent] = []
        self.generation = 1
        for node in ("a", "b"):
            self.give(FromNode(node, NodeJoined(facts=facts(node), generation=1)))

    def give(self, event: AnyEvent) -> list[AnyEvent]:
        found = list(self.monitor.observe(self.job.now_ns, event))
        self.verdicts += found
        for verdict in found:
            self.job.apply(verdict)
        return found

    def beat(self, step: int, *, node: str = "", **more: Any) -> list[AnyEvent]:
        """All ranks (of a node) are at `step`."""
        found: list[AnyEvent] = []
        for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
            if node in ("", name):
                beats = tuple(
                    WorkerBeat(
                        rank=rank, phase=more.get("phase", "train"), step=step, ticks=2 * step + 2,
                        step_s=more.get("step_s", 0.5), quiet_s=more.get("quiet_s", 0.0),
                        stopped=rank in more.get("stopped", ()), keeps=more.get("keeps", ""),
                        pulse_age_s=9.0 if rank in more.get("stale", ()) else 0.1, loss=1.5,
                        idle_s=0.0 if rank in more.get("busy", ()) else more.get("idle_s", 0.0),
                    )
                    for rank in ranks
                )  # fmt: skip
                found += self.give(
                    FromNode(name, Heartbeat(generation=self.generation, workers=beats))
                )
        return found

    def train(self, steps: int, first: int = 0) -> Self:
        for step in range(first, first + steps):
            self.job.now_ns += SECOND // 2
            self.beat(step)
        return self

    def inspect(self, **activities: Any) -> None:
        """The answers of all ranks; those without a name here wait for their peers."""
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            kinds = {rank: activities.get(f"rank{rank}", "peers") for rank in ranks}
            stacks = tuple(
                Stack(rank, 'File "train.py", line 8 in load', kind == "peers", "S", kind)
                for rank, kind in kinds.items()
            )
            event = FromNode(node, GroupInspected(generation=self.generation, stacks=stacks))
            self.job.apply(event)
            self.give(event)

    def quiet(self, seconds: float, **more: Any) -> None:
        """Heartbeats without steps, until the first hang. `activities`: what ranks answer."""
        activities = more.pop("activities", None)
        until = self.job.now_ns + round(seconds * SECOND)
        last, since = more.pop("step"), self.job.now_ns
        while self.job.now_ns < until and not self.hangs:
            due = self.monitor.next_deadline_ns()
            beat_at = self.job.now_ns + SECOND // 2
            if due is not None and due < beat_at:
                self.job.now_ns = due
                suspected = any(isinstance(v, HangSuspected) for v in self.give(Tick()))
                if suspected and activities is not None:
                    self.inspect(**activities)
                continue
            self.job.now_ns = beat_at
            quiet_s = (self.job.now_ns - since) / SECOND
            idle = {"idle_s": max(0.0, quiet_s - 1.0)} if activities is not None else {}
            found = self.beat(last, quiet_s=quiet_s, **idle, **more)
            if activities is not None and any(isinstance(v, HangSuspected) for v in found):
                self.inspect(**activities)

    def of(self, kind: type[Any]) -> list[Any]:
        return [verdict for verdict in self.verdicts if isinstance(verdict, kind)]

    @property
    def hangs(self) -> list[HangDetected]:
        return [v for v in self.verdicts if isinstance(v, HangDetected)]

    @property
    def steps(self) -> list[int]:
        return [v.step for v in self.verdicts if isinstance(v, StepCompleted)]


class Script(Watch):
    """A script of four ranks on two nodes."""

    def __init__(self, **document: Any) -> None:
        super().__init__(script=True, **document)

    def beats(self, *of_ranks: dict[str, Any], generation: int = 1) -> list[AnyEvent]:
        """Events of a heartbeat of each rank."""
        found = []
        for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
            workers = tuple(
                WorkerBeat(rank=rank, **{"pulse_age_s": 0.1, **of_ranks[rank]}) for rank in ranks
            )
            event = FromNode(node, Heartbeat(generation=generation, workers=workers))
            found += self.give(event)
        return found

    def posted(self, step: int, generation: int = 1, **more: Any) -> list[AnyEvent]:
        """Rank 0 posts for all."""
        ticks = 1 if step < 0 else 2 + step
        reported = {
            "step": step,
            "ticks": ticks,
            "counted_by": "posted" if step >= 0 else "",
            **more,
        }
        return self.beats(reported, {}, {}, {}, generation=generation)

    def restart(self) -> None:
        self.job.exits(3, signal=9)
        self.job.all_stopped(None)
        self.job.wait(0.5)
        self.job.succeed(LaunchGroup)


class Watched:
    """A running job of many ranks, and its monitor."""

    def __init__(self) -> None:
        nodes = {"min": NODES, "max": NODES}
        self.transcript = Transcript(spec(nodes, workers=WORKERS, shard=WORKERS))
        self.monitor = ProgressMonitor(
            job_from_mapping(self.transcript.document), self.transcript.controller
        )
        self.transcript.started(*NAMES, step=None)
        for now_ns, event in self.transcript.journal:
            self.monitor.observe(now_ns, event)
        self.now_ns = self.transcript.now_ns

    def beat(self, name: str, step: int) -> tuple[AnyEvent, ...]:
        workers = tuple(
            WorkerBeat(rank=seat.rank, phase="train", step=step, ticks=step + 2, step_s=0.5)
            for seat in self.transcript.state.group.launches[name].seats
        )
        return self.monitor.observe(
            self.now_ns, FromNode(name, Heartbeat(generation=1, workers=workers))
        )

    def wait_until_due(self) -> tuple[AnyEvent, ...]:
        due = self.monitor.next_deadline_ns()
        assert due is not None
        self.now_ns = max(self.now_ns, due)
        return self.monitor.observe(self.now_ns, Tick())
