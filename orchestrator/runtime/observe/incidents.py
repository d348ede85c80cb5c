"""What there is to see of interruptions: the newest ones in full, and counters over all of them.

Owns: Incident views and the Tally. Must not: decide what an interruption is; the core's records
say so.

The core keeps a bounded list of records. A counter that counted them would fall when the oldest is
forgotten, so each is counted in for good when it can change no more: when the next one has begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.orchestrator.core.state import IncidentRecord, JobState

from .goodput import NS
from .view import Incident, IncidentCount, JobView, PhaseTotal

KINDS = (
    ("user", "worker"),
    ("infrastructure", "worker"), ("infrastructure", "node"),
    ("preemption", "worker"), ("preemption", "node"),
    ("hang", "worker"), ("hang", "node"),
    ("resize", "job"), ("suspend", "job"), ("cancel", "job"), ("deadline", "job"),
)  # fmt: skip
"""(class, what was lost) that there can be: an error of the user is always that of a worker, and
what is planned happens to the whole job."""


@dataclass(slots=True)
class IncidentCounter:
    """Counters over the interruptions of a job."""

    through: int = 0
    """Number of the last one that is counted in."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(class, what was lost: worker, node or job)."""
    phases: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Phase -> (how often it ended, seconds)."""
    steps_lost: int = 0

    def settle(self, state: JobState, *, no_steps: bool) -> None:
        """Count in those that can change no more."""
        if state.num_incidents - 1 <= self.through:
            return
        for record in state.incidents:
            if self.through < record.number < state.num_incidents:
                self._count(record, no_steps=no_steps)
                self.through = record.number

    def _count(self, record: IncidentRecord, *, no_steps: bool) -> None:
        one = incident(record, no_steps=no_steps)
        if record.stopped_ns is not None:  # before, nobody knows what it was
            scope = "worker" if one.culprit_rank is not None else "node"
            if record.failure_class is None:
                scope = "job"
            key = (one.failure_class, scope)
            self.counts[key] = self.counts.get(key, 0) + 1
        for phase, seconds in one.seconds.items():
            count, total = self.phases.get(phase, (0, 0.0))
            self.phases[phase] = (count + 1, total + seconds)
        self.steps_lost += one.steps_lost or 0

    def fill(self, view: JobView, state: JobState, *, no_steps: bool) -> None:
        """The counters as of now, the newest interruption included as far as it is known."""
        now = IncidentCounter(self.through, dict(self.counts), dict(self.phases), self.steps_lost)
        if state.incidents and state.incidents[-1].number > self.through:
            now._count(state.incidents[-1], no_steps=no_steps)
        view.num_incidents, view.steps_lost = state.num_incidents, now.steps_lost
        view.incident_counts = [
            IncidentCount(failure_class=name, scope=scope, count=count)
            for (name, scope), count in sorted(now.counts.items())
        ]
        view.recovery = {
            phase: PhaseTotal(count=count, seconds=seconds)
            for phase, (count, seconds) in now.phases.items()
        }


def incident_views(state: JobState, *, no_steps: bool) -> list[Incident]:
    """Those that are remembered, oldest first."""
    found = [incident(one, no_steps=no_steps) for one in state.incidents]
    for one, after in pairwise(found):
        if "total" not in one.seconds:
            one.overtaken_by = after.number
    return found


def incident(record: IncidentRecord, *, no_steps: bool) -> Incident:
    lost = None
    if record.resumed_after_step is not None and not no_steps:
        lost = max(0, record.step_before - record.resumed_after_step)
    planned = record.purpose if record.purpose not in ("failure", "preemption") else ""
    return Incident(
        number=record.number,
        at_ns=record.at_ns,
        failure_class=record.failure_class or planned or "infrastructure",
        title=record.title,
        culprit_node=record.culprit_node,
        culprit_rank=record.culprit_rank,
        evidence=record.evidence,
        decision=record.decision,
        rehearsal=record.fault_injected,
        generation_before=record.generation_before,
        generation_after=record.generation_after,
        world_size_before=record.world_size_before,
        world_size_after=record.world_size_after,
        resumed_after_step=record.resumed_after_step,
        restored_from=record.restored_from,
        steps_lost=lost,
        seconds=_seconds(record, no_steps=no_steps),
        no_steps=no_steps,
        traceback=record.traceback,
        stacks={str(rank): text for rank, text in record.stacks.items()},
    )


def _seconds(record: IncidentRecord, *, no_steps: bool) -> dict[str, float]:
    """By phase, in order; the phases so far add up to the time so far."""
    ends = {
        "stop": record.stopped_ns,
        "place": record.launched_ns,
        "launch": record.started_ns,
        "first-step": record.first_step_ns,
    }
    seconds: dict[str, float] = {}
    at_ns = record.at_ns
    for phase, end_ns in ends.items():
        if end_ns is not None:
            seconds[phase] = max(0, end_ns - at_ns) / NS
            at_ns = max(at_ns, end_ns)
    over_ns = record.started_ns if no_steps else record.first_step_ns
    if over_ns is not None:
        seconds["total"] = (over_ns - record.at_ns) / NS
    return seconds
