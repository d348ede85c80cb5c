"""Records a trace with torch.profiler in a worker that trains, from one step boundary to another.

The pulse thread takes the agent's request; the training thread, whose operations torch's profiler
follows, starts and ends it where a step ends; a thread of its own writes the file. Nothing of
torch.profiler is imported before the first request.

One step is recorded first: its size shows how many are not too large. On a GPU this also keeps the
time in which the driver prepares itself out of the trace.

torch records for one profiler at a time: one that begins cancels the other, which then ends the
process when its trace is written. So no recording begins beside a profiler of the script, and one
that is under way ends before such a profiler begins.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.workers import worker_protocol

if TYPE_CHECKING:
    from .agent_channel import AgentChannel

NO_STEPS = (
    "this worker has not said where its steps end, and a trace begins and ends there; call "
    "session.report(step) of `from holdfast import session` after each step, or give the trainer a "
    "callback of holdfast.integrations; py-spy needs neither: leave --torch out"
)
BUSY = "the script runs a profiler of its own, and torch has one at a time"
USED_SHARE = 0.8
"""Of the allowed bytes, by the size of one step: others may be larger."""


class StepTrace:
    """One request, from its arrival to the written file."""

    def __init__(self, wanted: worker_protocol.TraceWanted) -> None:
        self._wanted = wanted
        self._expires_s = time.monotonic() + wanted.wait_s
        self._profiler: Any = None
        self._label: Any = None
        """The range of the step under way: the trace names it."""
        self._max_steps: int | None = None
        """None: the first step has not shown it yet."""
        self._first = self._last = 0
        self._began_s = 0.0
        self._restore: Callable[[], None] = lambda: None
        """Undoes _make_way."""
        self._cancelled = False
        """By a profiler of another thread, for which this one must not end the recording."""

    @property
    def records(self) -> bool:
        return self._profiler is not None

    def boundary(self, step: int, channel: AgentChannel) -> None:
        """Step `step` has ended, in the thread that trains. A failure of the profiler is the
        answer: training goes on."""
        try:
            if self._profiler is None:
                self._begin_first(step, channel)
            elif self._cancelled:
                self._give_up(channel)
            else:
                self._next(step, channel)
        except (RuntimeError, OSError, ImportError, AssertionError) as error:
            self._fail(f"torch.profiler: {type(error).__name__}: {error}", channel)

    def _begin_first(self, step: int, channel: AgentChannel) -> None:
        if time.monotonic() > self._expires_s:
            channel.trace = None  # the agent has given up
            return
        # The driver's part of it takes seconds on a GPU, while the other ranks wait.
        with _takes_time(channel):
            if _other_profiler():
                self._fail(BUSY, channel)
                return
            self._begin(step, channel)

    def _begin(self, step: int, channel: AgentChannel) -> None:
        from torch.profiler import profile

        profiler = profile()
        profiler.start()
        self._profiler, self._first, self._last = profiler, step + 1, step
        self._began_s = time.monotonic()
        self._enter_step(step + 1)
        self._make_way(channel)

    def _next(self, step: int, channel: AgentChannel) -> None:
        self._leave_step()
        self._last = step
        recorded, wanted = step - self._first + 1, self._wanted
        if self._max_steps is None:
            with _takes_time(channel):
                self._learn_size()
                self._begin(step, channel)
        elif (wanted.steps and recorded >= wanted.steps) or self._seconds() >= wanted.seconds:
            self._end("", channel)
        elif recorded >= self._max_steps:
            self._end("ended early: a longer one would be too large", channel)
        else:
            self._enter_step(step + 1)

    def _learn_size(self) -> None:
        """Raises OSError."""
        self._restore()
        self._profiler.stop()
        file = Path(self._wanted.file)
        self._profiler.export_chrome_trace(str(file))
        _expect_whole(file)
        step_bytes = len(zlib.compress(file.read_bytes(), 6))
        self._max_steps = max(1, int(USED_SHARE * self._wanted.max_bytes / step_bytes))

    def _enter_step(self, step: int) -> None:
        from torch.profiler import record_function

        self._label = record_function(f"step {step}")
        self._label.__enter__()

    def _leave_step(self) -> None:
        self._label.__exit__(None, None, None)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    def _make_way(self, channel: AgentChannel) -> None:
        """For a profiler of the script, before torch prepares it."""
        import torch.autograd.profiler as torchs

        name, here = "_prepare_profiler", threading.get_ident()
        prepare = getattr(torchs, name)

        def end_first(*given: Any, **more: Any) -> Any:
            self._restore()
            if threading.get_ident() == here:
                self._leave_step()
                self._end(f"ended early: {BUSY}", channel)
            else:
                self._cancelled = True
                _answer(channel, problem=BUSY)
            return prepare(*given, **more)

        setattr(torchs, name, end_first)
        self._restore = lambda: setattr(torchs, name, prepare)

    def _give_up(self, channel: AgentChannel) -> None:
        """Once the other profiler has ended: before, this would end that one."""
        import torch.autograd.profiler as torchs

        if not torchs._is_profiler_enabled:
            self._leave_step()
            self._profiler.stop()
            channel.trace = None

    def _fail(self, problem: str, channel: AgentChannel) -> None:
        self._restore()
        channel.trace = None
        _answer(channel, problem=problem)

    def _end(self, why: str, channel: AgentChannel) -> None:
        channel.trace = None
        self._restore()
        seconds = self._seconds()
        with _takes_time(channel):
            self._profiler.stop()
        if self._last < self._first or self._max_steps is None:
            _answer(channel, problem=why)
            return
        threading.Thread(
            target=self._write, args=(channel, seconds, why), name="holdfast-trace", daemon=True
        ).start()

    def _write(self, channel: AgentChannel, seconds: float, why: str) -> None:
        try:
            self._profiler.export_chrome_trace(self._wanted.file)
            _expect_whole(Path(self._wanted.file))
        except Exception as error:  # of torch, of the disk
            _answer(channel, problem=f"torch.profiler: {type(error).__name__}: {error}")
            return
        steps = f"step {self._first}"
        if self._last > self._first:
            steps = f"steps {self._first} to {self._last}"
        _answer(channel, detail=f"{steps}, {seconds:.1f} s" + (f", {why}" if why else ""))


@contextmanager
def _takes_time(channel: AgentChannel) -> Iterator[None]:
    """A phase in which this rank and the others, which wait for it, do not count as hung."""
    before = channel.phase
    channel.enter("evaluate")
    try:
        yield
    finally:
        channel.enter(before)


def _other_profiler() -> bool:
    """Whether one records, or is about to. Looks at all objects once: a tenth of a second."""
    from torch.autograd import profiler as torchs
    from torch.profiler import ProfilerAction, profile

    return torchs._is_profiler_enabled or any(
        issubclass(type(one), profile) and one.current_action is ProfilerAction.WARMUP
        for one in gc.get_objects()
    )


def _answer(channel: AgentChannel, detail: str = "", problem: str = "") -> None:
    try:
        channel.send(worker_protocol.TraceWritten(detail=detail, problem=problem))
    except Exception as error:  # the training thread reports a closed socket
        print(f"holdfast: the trace was not reported: {error}", file=sys.stderr)


def _expect_whole(file: Path) -> None:
    """torch only logs that it could not write. Raises OSError."""
    with file.open("rb") as written:
        written.seek(max(0, file.stat().st_size - 16))
        if not written.read().rstrip().endswith(b"}"):
            raise OSError(f"{file} is not whole; is the disk full?")
