"""Where the time went: every nanosecond since submission belongs to exactly one cause.

Owns: the accounting. A pure fold over (time, event, state after it). Must not: read a clock.

Training time is settled when a report of progress tells what it bought: steps for the first time
(productive), steps again after a loss (redone), or waiting for staging (stalled). When a generation
is interrupted, what exceeds its finished steps (a partial step, the silence before a hang was
noticed) is part of the recovery.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from holdfast.orchestrator.core.events import AnyEvent, StepCompleted
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.core.transitions import TERMINAL, JobPhase

from .view import LedgerCause

NS = 1_000_000_000
CAUSES: tuple[LedgerCause, ...] = get_args(LedgerCause)
CAUSE_OF: dict[JobPhase, LedgerCause] = {
    "pending": "waiting",
    "starting": "starting",
    "recovering": "recovering",
    "finishing": "finishing",
    "suspending": "suspended",
    "suspended": "suspended",
}
"""`running` is split by what it bought; the terminal phases take no time."""


@dataclass(slots=True)
class TimeTotals:
    """All that the ledger remembers."""

    ns: dict[LedgerCause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    phase: JobPhase = "pending"
    at_ns: int | None = None
    open_ns: int = 0
    """Training time since the last report of progress."""
    interrupted_ns: int = 0
    """Training time of an interrupted generation since its last report."""
    waited_before_launch_ns: int = 0
    launched: bool = False
    step: int = -1
    high: int = -1
    step_s: float = 0.0
    generation: int = 0
    reported: bool = False


class TimeAccounting:
    """The accounts of one job, and how events change them."""

    def __init__(self, accounts: TimeTotals | None = None) -> None:
        self._books = accounts or TimeTotals()

    def observe(self, now_ns: int, event: AnyEvent, state: JobState) -> None:
        self._elapse(now_ns)
        if state.generation != self._books.generation:
            self._begin(state)
        if isinstance(event, StepCompleted) and event.generation == state.generation:
            self._progress(event)
        if self._books.phase == "running" and state.phase != "running":
            self._interrupt(state)
        self._books.phase = state.phase
        if self._books.interrupted_ns and state.stop is None:
            self._conclude(state)

    def _elapse(self, now_ns: int) -> None:
        if self._books.at_ns is None:
            self._books.at_ns = now_ns
        elapsed, self._books.at_ns = (
            max(0, now_ns - self._books.at_ns),
            max(now_ns, self._books.at_ns),
        )
        if self._books.phase == "running":
            self._books.open_ns += elapsed
        elif self._books.phase not in TERMINAL:
            self._books.ns[CAUSE_OF[self._books.phase]] += elapsed
            if not self._books.launched:
                self._books.waited_before_launch_ns += elapsed

    def _begin(self, state: JobState) -> None:
        restore = state.membership.restore if state.membership else None
        self._books.generation, self._books.reported, self._books.launched = (
            state.generation,
            False,
            True,
        )
        self._books.step = restore.step if restore else -1

    def _progress(self, event: StepCompleted) -> None:
        if event.step > self._books.step:
            self._settle(self._books.open_ns, event.step, event.stall_s)
            self._books.open_ns = 0
        self._books.step_s = event.step_s or self._books.step_s
        self._books.reported = True

    def _settle(self, spent_ns: int, step: int, stall_s: float = 0.0) -> None:
        """Training time that brought the job from the last known step to `step`."""
        steps = step - self._books.step
        redone = min(max(0, self._books.high - self._books.step), steps)
        stalled_ns = min(spent_ns, int(steps * stall_s * NS))
        redone_ns = (spent_ns - stalled_ns) * redone // steps
        self._books.ns["stalled"] += stalled_ns
        self._books.ns["redone"] += redone_ns
        self._books.ns["productive"] += spent_ns - stalled_ns - redone_ns
        self._books.step, self._books.high = step, max(self._books.high, step)

    def _interrupt(self, state: JobState) -> None:
        if not self._books.reported or state.phase not in ("recovering", "suspending"):
            # A script that says nothing of its steps, or a job that is through.
            again = self._books.reported and self._books.step < self._books.high
            self._books.ns["redone" if again else "productive"] += self._books.open_ns
        else:
            self._books.interrupted_ns += self._books.open_ns
        self._books.open_ns = 0

    def _conclude(self, state: JobState) -> None:
        """All nodes have stopped, so the last step that all ranks finished is known."""
        last = state.incidents[-1].step_before if state.incidents else self._books.step
        spent_ns, self._books.interrupted_ns = self._books.interrupted_ns, 0
        useful_ns = 0
        if last > self._books.step:
            useful_ns = min(spent_ns, int((last - self._books.step) * self._books.step_s * NS))
            self._settle(useful_ns, last)
        self._books.ns["recovering"] += spent_ns - useful_ns

    # -- reading -------------------------------------------------------------------------------
    def seconds(self, now_ns: int) -> dict[str, float]:
        """By cause, up to now; they add up to the time since submission."""
        return {cause: ns / NS for cause, ns in self._until(now_ns).items()}

    def goodput(self, now_ns: int) -> float:
        """Productive time over time since the first launch."""
        until = self._until(now_ns)
        if not self._books.launched:
            return 0.0
        total = sum(until.values()) - self._books.waited_before_launch_ns
        return until["productive"] / total if total > 0 else 0.0

    def _until(self, now_ns: int) -> dict[LedgerCause, int]:
        ns = dict(self._books.ns)
        elapsed = max(0, now_ns - self._books.at_ns) if self._books.at_ns is not None else 0
        again = self._books.reported and self._books.step < self._books.high
        ns["redone" if again else "productive"] += self._books.open_ns + self._books.interrupted_ns
        if self._books.phase == "running":
            ns["redone" if again else "productive"] += elapsed
        elif self._books.phase not in TERMINAL:
            ns[CAUSE_OF[self._books.phase]] += elapsed
        return ns
