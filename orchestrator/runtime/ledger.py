"""Where the time went: every nanosecond since submission belongs to exactly one cause.

Owns: the accounting. A pure fold over (time, event, state after it). Must not: read a clock.

Training time is settled when a report of progress tells what it bought: steps for the first time
(productive), steps again after a loss (redone), or waiting for staging (stalled). When a generation
is interrupted, what exceeds its finished steps (a partial step, the silence before a hang was
noticed) is part of the recovery.
"""

from __future__ import annotations

from typing import get_args

from ..core.events import AnyEvent, StepsAdvanced
from ..core.state import JobState
from ..core.transitions import Phase
from .view import LedgerCause

NS = 1_000_000_000
CAUSES: tuple[LedgerCause, ...] = get_args(LedgerCause)
CAUSE_OF: dict[Phase, LedgerCause] = {
    "pending": "waiting",
    "starting": "starting",
    "recovering": "recovering",
    "finishing": "finishing",
    "suspending": "suspended",
    "suspended": "suspended",
}
"""`running` is split by what it bought; the terminal phases take no time."""
TERMINAL = ("succeeded", "failed", "cancelled")


class TimeLedger:
    """The accounts of one job."""

    def __init__(self) -> None:
        self._ns: dict[LedgerCause, int] = dict.fromkeys(CAUSES, 0)
        self._phase: Phase = "pending"
        self._at_ns: int | None = None
        self._open_ns = 0
        """Training time since the last report of progress."""
        self._interrupted_ns = 0
        """Training time of an interrupted generation since its last report."""
        self._waited_before_launch_ns = 0
        self._launched = False
        self._step, self._high, self._step_s = -1, -1, 0.0
        self._generation, self._reported = 0, False

    def observe(self, now_ns: int, event: AnyEvent, state: JobState) -> None:
        self._elapse(now_ns)
        if state.generation != self._generation:
            self._begin(state)
        if isinstance(event, StepsAdvanced) and event.generation == state.generation:
            self._progress(event)
        if self._phase == "running" and state.phase != "running":
            self._interrupt(state)
        self._phase = state.phase
        if self._interrupted_ns and state.stop is None:
            self._conclude(state)

    def _elapse(self, now_ns: int) -> None:
        if self._at_ns is None:
            self._at_ns = now_ns
        elapsed, self._at_ns = max(0, now_ns - self._at_ns), max(now_ns, self._at_ns)
        if self._phase == "running":
            self._open_ns += elapsed
        elif self._phase not in TERMINAL:
            self._ns[CAUSE_OF[self._phase]] += elapsed
            if not self._launched:
                self._waited_before_launch_ns += elapsed

    def _begin(self, state: JobState) -> None:
        restore = state.membership.restore if state.membership else None
        self._generation, self._reported, self._launched = state.generation, False, True
        self._step = restore.step if restore else -1

    def _progress(self, event: StepsAdvanced) -> None:
        if event.step > self._step:
            self._settle(self._open_ns, event.step, event.stall_s)
            self._open_ns = 0
        self._step_s = event.step_s or self._step_s
        self._reported = True

    def _settle(self, spent_ns: int, step: int, stall_s: float = 0.0) -> None:
        """Training time that brought the job from the last known step to `step`."""
        steps = step - self._step
        redone = min(max(0, self._high - self._step), steps)
        stalled_ns = min(spent_ns, int(steps * stall_s * NS))
        redone_ns = (spent_ns - stalled_ns) * redone // steps
        self._ns["stalled"] += stalled_ns
        self._ns["redone"] += redone_ns
        self._ns["productive"] += spent_ns - stalled_ns - redone_ns
        self._step, self._high = step, max(self._high, step)

    def _interrupt(self, state: JobState) -> None:
        if not self._reported or state.phase not in ("recovering", "suspending"):
            # A script that says nothing of its steps, or a job that is through.
            again = self._reported and self._step < self._high
            self._ns["redone" if again else "productive"] += self._open_ns
        else:
            self._interrupted_ns += self._open_ns
        self._open_ns = 0

    def _conclude(self, state: JobState) -> None:
        """All nodes have stopped, so the last step that all ranks finished is known."""
        last = state.incidents[-1].step_before if state.incidents else self._step
        spent_ns, self._interrupted_ns = self._interrupted_ns, 0
        useful_ns = 0
        if last > self._step:
            useful_ns = min(spent_ns, int((last - self._step) * self._step_s * NS))
            self._settle(useful_ns, last)
        self._ns["recovering"] += spent_ns - useful_ns

    # -- reading -------------------------------------------------------------------------------
    def seconds(self, now_ns: int) -> dict[str, float]:
        """By cause, up to now; they add up to the time since submission."""
        return {cause: ns / NS for cause, ns in self._until(now_ns).items()}

    def goodput(self, now_ns: int) -> float:
        """Productive time over time since the first launch."""
        until = self._until(now_ns)
        if not self._launched:
            return 0.0
        total = sum(until.values()) - self._waited_before_launch_ns
        return until["productive"] / total if total > 0 else 0.0

    def _until(self, now_ns: int) -> dict[LedgerCause, int]:
        ns = dict(self._ns)
        elapsed = max(0, now_ns - self._at_ns) if self._at_ns is not None else 0
        again = self._reported and self._step < self._high
        ns["redone" if again else "productive"] += self._open_ns + self._interrupted_ns
        if self._phase == "running":
            ns["redone" if again else "productive"] += elapsed
        elif self._phase not in TERMINAL:
            ns[CAUSE_OF[self._phase]] += elapsed
        return ns
