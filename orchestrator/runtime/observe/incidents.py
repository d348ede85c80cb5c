"""Views of incidents: the newest ones in full, and counters over all of them.

The core keeps a bounded list of records, so counting that list would make a counter fall. Each
incident is therefore added to the counters once, when it cannot change any more: when the next one
has begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.state import IncidentRecord, JobState
from holdfast.orchestrator.protocol.facts import LaunchIncident

from .view import Incident, IncidentCount, JobView, PhaseTotal

KINDS = (
    ("user", "worker"),
    ("infrastructure", "worker"), ("infrastructure", "node"),
    ("preemption", "worker"), ("preemption", "node"),
    ("hang", "worker"), ("hang", "node"),
    ("resize", "job"), ("new-code", "job"), ("suspend", "job"), ("cancel", "job"),
    ("deadline", "job"),
)  # fmt: skip
"""The possible pairs of (class, what was lost): a user error always comes from a worker, and a
planned interruption is one of the whole job."""


@dataclass(slots=True)
class IncidentCounter:
    """Counters over the incidents of a job. Snapshots hold it by field name."""

    through: int = 0
    """Number of the last incident that was added."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(class, what was lost: worker, node or job)."""
    phases: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Phase -> (how often it ended, seconds)."""
    steps_lost: int = 0
    at_least: bool = False
    """More steps may have been lost."""

    def settle(self, state: JobState, *, no_steps: bool) -> None:
        """Add the incidents that cannot change any more."""
        if state.num_incidents - 1 <= self.through:
            return
        for record in state.incidents:
            if self.through < record.number < state.num_incidents:
                self._count(record, no_steps=no_steps)
                self.through = record.number

    def _count(self, record: IncidentRecord, *, no_steps: bool) -> None:
        view = incident(record, no_steps=no_steps)
        if record.stopped_ns is not None:  # until then its class is unknown
            scope = "worker" if view.culprit_rank is not None else "node"
            if record.failure_class is None:
                scope = "job"
            key = (view.failure_class, scope)
            self.counts[key] = self.counts.get(key, 0) + 1
        for phase, seconds in view.seconds.items():
            count, total = self.phases.get(phase, (0, 0.0))
            self.phases[phase] = (count + 1, total + seconds)
        self.steps_lost += view.steps_lost or 0
        self.at_least |= view.steps_lost_at_least

    def fill(self, view: JobView, state: JobState, *, no_steps: bool) -> None:
        """The counters of now, with what is known of the newest incident."""
        now = replace(self, counts=dict(self.counts), phases=dict(self.phases))
        if state.incidents and state.incidents[-1].number > self.through:
            now._count(state.incidents[-1], no_steps=no_steps)
        view.num_incidents = state.num_incidents
        view.steps_lost = None if no_steps and state.num_incidents else now.steps_lost
        view.steps_lost_at_least = now.at_least and view.steps_lost is not None
        view.incident_counts = [
            IncidentCount(failure_class=name, scope=scope, count=count)
            for (name, scope), count in sorted(now.counts.items())
        ]
        view.recovery = {
            phase: PhaseTotal(count=count, seconds=seconds)
            for phase, (count, seconds) in now.phases.items()
        }


def incident_views(state: JobState, *, no_steps: bool) -> list[Incident]:
    """The incidents that the core still has, oldest first."""
    incidents = [incident(entry, no_steps=no_steps) for entry in state.incidents]
    for record, (view, after) in zip(state.incidents, pairwise(incidents), strict=False):
        if "total" not in view.seconds and not _end_is_unknown(record, no_steps=no_steps):
            view.overtaken_by = after.number
    return incidents


def _end_is_unknown(record: IncidentRecord, *, no_steps: bool) -> bool:
    """The workers of a script that has never shown progress run again. Whether they train is not
    known."""
    unseen = no_steps and not record.shows_progress and record.first_step_ns is None
    return unseen and record.started_ns is not None


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
        steps_lost_at_least=(record.at_least or record.resumed_estimated) and lost is not None,
        seconds=_seconds(record),
        no_steps=no_steps,
        inferred=no_steps and record.first_step_ns is not None,
        traceback=record.traceback,
        stacks={str(rank): text for rank, text in record.stacks.items()},
    )


def launch_incidents(state: JobState, generation: int) -> tuple[LaunchIncident, ...]:
    """Incidents for the workers of this generation: the one that led to its launch, and those right
    before that were not over when the next one began. Oldest first."""
    if not state.incidents or state.incidents[-1].generation_after != generation:
        return ()
    incidents = [state.incidents[-1]]
    for record in state.incidents[-2 : -limits.MAX_LAUNCH_INCIDENTS - 1 : -1]:
        began = None if record.shows_progress else record.started_ns
        if record.first_step_ns is not None or began is not None:
            break
        incidents.insert(0, record)
    return tuple(_for_launch(record, incidents[-1]) for record in incidents)


def _for_launch(record: IncidentRecord, newest: IncidentRecord) -> LaunchIncident:
    shown = incident(record, no_steps=False)
    assert newest.world_size_after is not None
    return LaunchIncident(
        number=shown.number,
        at_ns=shown.at_ns,
        failure_class=shown.failure_class,
        title=_short(shown.title),
        decision=_short(shown.decision),
        last_step=record.step_before,
        last_step_at_least=record.at_least,
        rehearsal=shown.rehearsal,
        world_size_before=shown.world_size_before,
        world_size_after=shown.world_size_after or newest.world_size_after,
    )


def _short(text: str) -> str:
    limit = limits.MAX_LAUNCH_INCIDENT_CHARS
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _seconds(record: IncidentRecord) -> dict[str, float]:
    """Seconds by phase, in order; their sum is the time until now, and `total` once it is over."""
    early = record.noticed_ns > record.at_ns
    ends = {
        **({"detect": record.noticed_ns} if early else {}),
        "stop": record.stopped_ns,
        "place": record.launched_ns,
        "launch": record.started_ns,
        "first-step": record.first_step_ns,
    }
    seconds: dict[str, float] = {}
    at_ns = record.at_ns
    for phase, end_ns in ends.items():
        if end_ns is not None:
            seconds[phase] = max(0, end_ns - at_ns) / SECOND_NS
            at_ns = max(at_ns, end_ns)
    if record.first_step_ns is not None:
        seconds["total"] = (record.first_step_ns - record.at_ns) / SECOND_NS
    return seconds
