"""Time accounting: every nanosecond since submission belongs to exactly one cause.

Training time is assigned when steps are reported: new steps (productive), steps trained again after
a loss (redone), or waiting for staging (stalled). What an interrupted generation spent beyond its
finished steps (a partial step, the time until a hang was detected) belongs to the recovery, and so
does what the first step of a generation takes longer than a step usually does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import (
    AnyEvent,
    CollectivesBegun,
    FromNode,
    HangDetected,
    ResumeRequested,
    StepCompleted,
)
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.core.transitions import TERMINAL, JobPhase
from holdfast.orchestrator.protocol.facts import SCRIPT_SOURCES
from holdfast.orchestrator.protocol.messages import OwnCheckpointSeen

from .view import LedgerCause

CAUSES: tuple[LedgerCause, ...] = get_args(LedgerCause)
CAUSE_OF: dict[JobPhase, LedgerCause] = {
    "pending": "waiting",
    "starting": "starting",
    "recovering": "recovering",
    "finishing": "finishing",
    "suspending": "suspended",
    "suspended": "suspended",
}
"""`running` is split by the steps that it trained; terminal phases take no time."""


@dataclass(slots=True)
class TimeTotals:
    """The state of the accounting. Snapshots hold it by field name."""

    ns: dict[LedgerCause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    phase: JobPhase = "pending"
    at_ns: int | None = None
    open_ns: int = 0
    """Training time since the last reported step."""
    interrupted_ns: int = 0
    """Training time of an interrupted generation since its last reported step."""
    unassigned_ns: int = 0
    """Nanoseconds of the last interruption: time that belongs to the recovery, unless it turns out
    that steps were finished in it."""
    unassigned_before_ns: int = 0
    """The same of earlier generations."""
    silent_ns: int = 0
    """Time counted as productive of an interrupted generation that reported no step."""
    launched: bool = False
    step: int = -1
    high: int = -1
    step_s: float = 0.0
    generation: int = 0
    reported: bool = False
    redoes: int = 0
    """The last generation of a silent script that was seen to begin at step 0 again."""


class TimeAccounting:
    """The accounting of one job: a pure fold over (time, event, state after it)."""

    def __init__(self, accounts: TimeTotals | None = None) -> None:
        self._totals = accounts or TimeTotals()

    def observe(self, now_ns: int, event: AnyEvent, state: JobState) -> None:
        self._elapse(now_ns)
        if state.generation != self._totals.generation:
            self._follow(state)  # the event that ended it has launched the next one
            self._begin(state)
        if isinstance(event, CollectivesBegun) and event.generation == state.generation:
            self._not_training(state, int(event.ago_s * SECOND_NS))
        if isinstance(event, HangDetected) and event.generation == state.generation:
            self._hang(event)
        self._started_over(event, state)
        if isinstance(event, StepCompleted):
            if event.generation == state.generation:
                if not self._totals.reported:
                    self._first(event, state)
                self._progress(event, state.stage_every_steps)
            else:
                # The last report of an interrupted generation: steps after it are trained again.
                self._totals.high = max(self._totals.high, event.step)
        self._follow(state)

    def _follow(self, state: JobState) -> None:
        """Account for a generation that was interrupted, and for what it finished if it stopped."""
        if self._totals.phase == "running" and state.phase != "running":
            self._interrupt(state)
        self._totals.phase = state.phase
        if self._totals.interrupted_ns and state.stop is None:
            self._conclude(state)
        if self._totals.silent_ns and state.stop is None:
            self._not_productive(state)

    def _started_over(self, event: AnyEvent, state: JobState) -> None:
        """A script that reports no steps has begun at step 0 again. A job that is held has trained
        in vain since then; if it goes on, what was trained before is trained again."""
        totals = self._totals
        if totals.high >= 0 or totals.reported:
            return
        match event:
            case FromNode(fact=OwnCheckpointSeen(unread=True) as seen):
                if not state.own.ignored_in == seen.generation != totals.redoes:
                    return
                totals.redoes = seen.generation
                if seen.waits:
                    totals.ns["redone"] += totals.open_ns
                    totals.open_ns = 0
                    return
            case ResumeRequested(start_over=True):
                pass
            case _:
                return
        totals.ns["redone"] += totals.ns["productive"]
        totals.ns["productive"] = 0

    def _elapse(self, now_ns: int) -> None:
        if self._totals.at_ns is None:
            self._totals.at_ns = now_ns
        elapsed = max(0, now_ns - self._totals.at_ns)
        self._totals.at_ns += elapsed
        if self._totals.phase == "running":
            self._totals.open_ns += elapsed
        elif self._totals.phase not in TERMINAL:
            self._totals.ns[self._cause()] += elapsed

    def _cause(self) -> LedgerCause:
        return CAUSE_OF[self._totals.phase] if self._totals.launched else "queued"

    def _begin(self, state: JobState) -> None:
        restore = state.group.membership.restore if state.group.membership else None
        self._totals.generation = state.generation
        self._totals.reported = False
        self._totals.unassigned_before_ns += self._totals.unassigned_ns
        self._totals.unassigned_ns = 0
        self._totals.launched = True
        self._totals.step = restore.step if restore else -1

    def _progress(self, event: StepCompleted, every: int) -> None:
        totals = self._totals
        if event.step > totals.step and totals.unassigned_ns:
            self._assign(event.step)
        elif event.step > totals.step and not (totals.interrupted_ns and totals.reported):
            since_ns = min(int(event.ago_s * SECOND_NS), totals.open_ns)
            self._settle(totals.open_ns - since_ns, event.step, event.stall_s / every)
            totals.open_ns = since_ns
        # `_conclude` counts what is reported while the generation stops.
        totals.step_s, totals.reported = event.step_s or totals.step_s, True

    def _first(self, event: StepCompleted, state: JobState) -> None:
        """The first report of a generation: the time before its first step was not training. A
        script begins after a step of its own."""
        totals = self._totals
        of_script = event.counted_by in SCRIPT_SOURCES
        if of_script and event.began_after is not None:
            self._assign_saved(event.began_after)
            totals.step = event.began_after
        if totals.unassigned_ns:
            return  # the generation has ended: `_assign` divides its time
        if of_script:
            self._not_training(state, int((event.first_ago_s + event.step_s) * SECOND_NS))
        elif event.step > totals.step:
            # The time of a first step alone includes the start-up.
            steps = event.step - totals.step
            step_s = totals.step_s or (event.step_s if steps > 1 else 0.0)
            self._not_training(state, int((steps * step_s + event.ago_s) * SECOND_NS))

    def _assign_saved(self, step: int) -> None:
        """The script continues after this step. Those that were never reported were trained all the
        same, in time that was counted as recovery."""
        totals = self._totals
        if step <= totals.high:
            return
        steps_ns = int((step - totals.high) * totals.step_s * SECOND_NS)
        useful_ns = min(totals.unassigned_before_ns, steps_ns)
        totals.ns["recovering"] -= useful_ns
        totals.ns["productive"] += useful_ns
        totals.unassigned_before_ns -= useful_ns
        totals.high = step

    def _hang(self, event: HangDetected) -> None:
        """Count the time in which a script that reports no steps did nothing."""
        if not self._totals.reported:
            quiet_ns = min(self._totals.open_ns, int(event.quiet_s * SECOND_NS))
            self._totals.ns["recovering"] += quiet_ns
            self._totals.open_ns -= quiet_ns

    def _not_training(self, state: JobState, trained_ns: int) -> None:
        """Count how long a script has trained while its workers ran."""
        totals = self._totals
        cause: LedgerCause = "recovering" if state.num_incidents else "starting"
        before_ns = max(totals.open_ns - trained_ns, -totals.ns[cause])
        totals.ns[cause] += before_ns
        totals.open_ns -= before_ns

    def _assign(self, last: int) -> None:
        """A report that came after the end of its generation: a part of the time that was counted
        as recovery was training."""
        steps_ns = int((last - self._totals.step) * self._totals.step_s * SECOND_NS)
        useful_ns = min(self._totals.unassigned_ns, steps_ns)
        self._settle(useful_ns, last)
        self._totals.ns["recovering"] -= useful_ns
        self._totals.unassigned_ns -= useful_ns

    def _settle(self, spent_ns: int, step: int, stall_s: float = 0.0) -> None:
        """Assign the training time from the last known step to `step`."""
        steps = step - self._totals.step
        redone = min(max(0, self._totals.high - self._totals.step), steps)
        stalled_ns = min(spent_ns, int(steps * stall_s * SECOND_NS))
        redone_ns = (spent_ns - stalled_ns) * redone // steps
        self._totals.ns["stalled"] += stalled_ns
        self._totals.ns["redone"] += redone_ns
        self._totals.ns["productive"] += spent_ns - stalled_ns - redone_ns
        self._totals.step, self._totals.high = step, max(self._totals.high, step)

    def _interrupt(self, state: JobState) -> None:
        silent = not self._totals.reported and self._totals.high < 0
        if silent or (state.phase == "finishing" and state.intent == "run"):
            # A script that reports no steps, or a job that has trained all its steps.
            again = self._totals.reported and self._totals.step < self._totals.high
            self._totals.ns["redone" if again else "productive"] += self._totals.open_ns
            opened = state.incidents and state.incidents[-1].noticed_ns == self._totals.at_ns
            self._totals.silent_ns = self._totals.open_ns if silent and opened else 0
        else:
            self._totals.interrupted_ns += self._totals.open_ns
        self._totals.open_ns = 0

    def _not_productive(self, state: JobState) -> None:
        """A script that reports no steps trained until the fault. `_hang` counts a hang's time."""
        last = state.incidents[-1] if state.incidents else None
        silent_ns, self._totals.silent_ns = self._totals.silent_ns, 0
        if last is not None and last.failure_class != "hang":
            unseen_ns = min(silent_ns, last.noticed_ns - last.at_ns)
            self._totals.ns["productive"] -= unseen_ns
            self._totals.ns["recovering"] += unseen_ns

    def _conclude(self, state: JobState) -> None:
        """All nodes have stopped, so the last step of all ranks is known."""
        last = self._totals.step
        if state.incidents and self._totals.reported:
            last = state.incidents[-1].step_before
        spent_ns, self._totals.interrupted_ns = self._totals.interrupted_ns, 0
        useful_ns = 0
        if last > self._totals.step:
            steps_ns = int((last - self._totals.step) * self._totals.step_s * SECOND_NS)
            useful_ns = min(spent_ns, steps_ns)
            self._settle(useful_ns, last)
        self._totals.ns["recovering"] += spent_ns - useful_ns
        self._totals.unassigned_ns = spent_ns - useful_ns

    # -- reading -------------------------------------------------------------------------------
    def seconds(self, now_ns: int) -> dict[str, float]:
        """Seconds by cause until now; their sum is the time since submission."""
        return {cause: ns / SECOND_NS for cause, ns in self._until(now_ns).items()}

    def goodput(self, now_ns: int) -> float:
        """Productive time divided by the time since the first launch."""
        until = self._until(now_ns)
        total = sum(until.values()) - until["queued"]
        return until["productive"] / total if total > 0 else 0.0

    def _until(self, now_ns: int) -> dict[LedgerCause, int]:
        ns = dict(self._totals.ns)
        elapsed = max(0, now_ns - self._totals.at_ns) if self._totals.at_ns is not None else 0
        again = self._totals.reported and self._totals.step < self._totals.high
        trained: LedgerCause = "redone" if again else "productive"
        ns[trained] += self._totals.open_ns + self._totals.interrupted_ns
        if self._totals.phase == "running":
            ns[trained] += elapsed
        elif self._totals.phase not in TERMINAL:
            ns[self._cause()] += elapsed
        return ns
