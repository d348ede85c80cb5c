"""The steps of a script that keeps its own checkpoints, as it or its framework reports them.

Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from holdfast.orchestrator.protocol.facts import SCRIPT_SOURCES, StepSource
from holdfast.workers.worker_protocol import Reported

SECOND_NS = 1_000_000_000


@dataclass
class ScriptProgress:
    """Progress of one worker."""

    source: StepSource = ""
    began_after: int | None = None
    """The step after which the script began; None: not known (yet)."""
    began_estimated: bool = False
    """True if the step may be another one: the steps before the first report are not reported."""
    _began_ns: int | None = None
    """Time at which a program that posts began to train."""
    _said_after: int | None = None
    """Step before the framework's first one, from its hook; None: not reported."""
    _first: tuple[int, int] | None = None
    """(step, time) of the first post of a step."""
    _last: tuple[int, int] | None = None
    _before: int = 0
    """Steps of earlier trainings in the same process."""
    _step_ns: float = 0.0
    _total: int = 0

    def received(self, now_ns: int, message: Reported) -> Reported | None:
        """The report with its step time; None: it says no more than those before it. Of several
        sources the most exact one counts: the session, the script, its framework, then posts."""
        if self.source not in ("", *SCRIPT_SOURCES[: SCRIPT_SOURCES.index(message.source) + 1]):
            return None
        if message.source != self.source:  # the more exact one may report the same step
            self.source, self._first, self._last = message.source, None, None
        if message.source == "posted":
            return self._posted(now_ns, message)
        self._began_ns = None
        if message.step < 0:
            self._said_after = message.began_after
            return None
        self._note_beginning(message.step)
        step = self._before + message.step
        if self._last is not None and step <= self._last[0]:
            # It trains a second time, such as another model. Steps of a job never go back.
            self._before = self._last[0] + 1 - message.step
            step = self._last[0] + 1
        if self._first is None:
            self._first = (step, now_ns)
        self._last = (step, now_ns)
        total = self._before + message.total_steps if message.total_steps else 0
        return replace(message, step=step, total_steps=total)

    def begins(self, after_step: int | None) -> None:
        """The worker says after which step it begins to train; None: it does not."""
        if after_step is not None and self._last is None and self.source != "session":
            self.began_after, self.began_estimated = after_step, False

    def _note_beginning(self, step: int) -> None:
        """Note where a script began. A hook's word counts from the first step on: until then the
        script may be loading, and is watched like one without reports. Of a script that does not
        say it and reports every Nth step, the second report shows N, and the steps before the first
        one are as many: until then at least that one was trained."""
        if self._last is None and self._said_after is not None and self._said_after < step:
            self.began_after, self.began_estimated = self._said_after, False
        elif self._last is None and self.began_after is None:
            self.began_after, self.began_estimated = step - 1, step > 0
        elif self._last is not None and self._last == self._first and self.began_estimated:
            first = self._first[0]
            stride = max(1, step - first)
            self.began_after, self.began_estimated = max(-1, first - stride), stride > 1

    def counted_by_session(self) -> None:
        """Each step is reported, and Holdfast has restored the state: where a framework began, as
        its posts before the first step had it, does not count."""
        self.source, self.began_after, self._began_ns = "session", None, None
        self.began_estimated = False

    def began_s(self, now_ns: int) -> float | None:
        """Seconds since a program that posts began to train; None: not known."""
        return None if self._began_ns is None else (now_ns - self._began_ns) / SECOND_NS

    def _posted(self, now_ns: int, message: Reported) -> Reported | None:
        if message.finished:
            return self._finished(now_ns, message)
        self._total = message.total_steps or self._total
        if message.step < 0:
            self._began_ns = now_ns if self._began_ns is None else self._began_ns
            return None
        if self._last is None:
            self._first = self._last = (message.step, now_ns)
            return message
        step, at_ns = self._last
        if message.step <= step:
            return None
        self._last = (message.step, now_ns)
        self._step_ns = step_ns = (now_ns - at_ns) / (message.step - step)
        if self.began_after is None:
            self.began_after, self.began_estimated = self._estimate(step_ns), True
        return replace(message, step_s=step_ns / SECOND_NS)

    def _finished(self, now_ns: int, message: Reported) -> Reported | None:
        """The last post has no step. If the rest fits into the time since the one before, all steps
        were trained; if not, the framework stopped early, after a step that is not known."""
        if self._last is None or not self._step_ns or not self._total:
            return None
        step, at_ns = self._last
        if (self._total - 1 - step) * self._step_ns > 1.5 * (now_ns - at_ns):
            return None
        self._last = (self._total - 1, now_ns)
        step_s = self._step_ns / SECOND_NS
        return replace(message, step=self._total - 1, total_steps=self._total, step_s=step_s)

    def _estimate(self, step_ns: float) -> int | None:
        """Posts come every few seconds, and the first one has no step. The steps before the first
        post that had one took as long as those after it."""
        if self._began_ns is None or self._first is None or step_ns <= 0:
            return None
        step, at_ns = self._first
        done = max(1, round((at_ns - self._began_ns) / step_ns))
        return max(-1, step - done)
