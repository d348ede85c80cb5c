"""Output of `holdfast run` while a job runs: a live display on a terminal, plain lines elsewhere.

It is called from the controller's event loop, so it must not block.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..core.transitions import TERMINAL
from ..runtime.observe.view import JobView
from .output import clock, count, plural
from .render import after, incident_title, is_open, live, outcome, steps

PROGRESS_INTERVAL_S = 5.0
REFRESH_PER_SECOND = 4
WATCH_INTERVAL_S = 1.0
HISTORY = 2000


class Display(Protocol):
    wants_lines: bool | None
    """True if `line` shall be called; None: where Holdfast does not know the progress itself, that
    is of a script."""

    def show(self, view: JobView) -> None: ...
    def note(self, text: str) -> None: ...
    def line(self, text: str) -> None:
        """Show a line that rank 0 has printed. Called from another thread."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: Any) -> None: ...


def make_display(console: Console, wants_lines: bool | None = None) -> Display:
    display = LiveDisplay(console) if console.is_terminal else LineDisplay(console)
    display.wants_lines = wants_lines
    return display


def watch_job(read: Callable[[], JobView], display: Display) -> JobView:
    """Show a job that another process runs, until it ends; its last view."""
    while True:
        view = read()
        display.show(view)
        if view.state in TERMINAL:
            return view
        time.sleep(WATCH_INTERVAL_S)


class SilentDisplay:
    """Prints only notes, for commands whose result is JSON.

    Notes bypass rich: a signal that raises while a Console prints may leave the Console buffering,
    and then the note after Ctrl-C, the most important one, would be lost.
    """

    wants_lines: bool | None = False

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def show(self, view: JobView) -> None:
        return None

    def line(self, text: str) -> None:
        self.note(f"[rank 0] {text}")

    def note(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class LiveDisplay:
    """Redraws a few times a second."""

    wants_lines: bool | None = None

    def __init__(self, console: Console) -> None:
        # Transient: the report replaces the live display.
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
        self._losses: list[float] = []
        self._step = -1

    def show(self, view: JobView) -> None:
        if view.loss is not None and view.step != self._step:
            self._losses = [*self._losses[-HISTORY:], view.loss]
            self._step = view.step
        self._live.update(live(view, self._losses))

    def note(self, text: str) -> None:
        self._live.console.print(text)

    def line(self, text: str) -> None:
        """Print a line above the live display; colours stay."""
        shown = Text.assemble(("[rank 0] ", "dim"), Text.from_ansi(text))
        self._live.console.print(shown, soft_wrap=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)


class LineDisplay(SilentDisplay):
    """Prints a line for every change, and a progress line every few seconds."""

    def __init__(self, console: Console, interval_s: float = PROGRESS_INTERVAL_S) -> None:
        super().__init__(console)
        self._interval_ns = int(interval_s * 1e9)
        self._last = JobView(name="")
        self._progress_ns = 0
        self._reasons: set[str] = set()
        """Reasons of this state of this generation, without numbers."""
        self._open: dict[int, bool] = {}

    def show(self, view: JobView) -> None:
        for line in self._changes(view):
            self._print(view, line)
        due = view.now_ns - self._progress_ns >= self._interval_ns
        if view.step >= 0 and view.step != self._last.step and (due or self._last.step < 0):
            self._print(view, progress_line(view))
            self._progress_ns = view.now_ns
        # A copy: the read model may change the view in place.
        self._last = JobView(
            name=view.name,
            state=view.state,
            step=view.step,
            generation=view.generation,
            nodes=[type(n)(name=n.name, state=n.state) for n in view.nodes],
            checkpoints=list(view.checkpoints),
        )

    def _print(self, view: JobView, line: str) -> None:
        self.note(f"{clock(view.now_ns)}  {line}")

    def _changes(self, view: JobView) -> list[str]:
        last, lines = self._last, []
        before = {node.name: node.state for node in last.nodes}
        for node in view.nodes:
            if before.get(node.name) != node.state:
                lines.append(f"{node.name} {node.state}")
        for incident in view.incidents:
            was_open = self._open.get(incident.number)
            if was_open is None:
                lines.append(f"incident {incident.number}: {incident_title(incident)}")
            still_open = is_open(incident) and incident.overtaken_by is None
            if was_open is not False and not still_open:
                lines.append(f"incident {incident.number} resolved: {outcome(incident)}")
            self._open[incident.number] = still_open
        if view.generation != last.generation and view.world_size:
            world = plural(view.world_size, "worker")
            mesh = f", {view.strategy}: {view.mesh}" if view.mesh else ""
            lines.append(f"generation {view.generation}: {world}{mesh}")
        # A suspected hang gives its reason again every few seconds, with another number of seconds.
        reason = re.sub(r"[\d.]+", "", view.reason)
        if view.state != last.state or view.generation != last.generation:
            self._reasons.clear()
        if view.state != last.state or reason not in self._reasons:
            lines.append(view.state + (f": {view.reason}" if view.reason else ""))
        self._reasons.add(reason)
        if view.checkpoints and view.checkpoints[-1:] != last.checkpoints[-1:]:
            lines.append(f"checkpoint {after(view.checkpoints[-1])} committed")
        return lines


def progress_line(view: JobView) -> str:
    parts = [steps(view)]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.tokens_per_s:
        parts.append(f"{count(view.tokens_per_s)} tokens/s")
    if view.memory_step >= 0:
        parts.append(f"{view.memory_step + 1} in memory")
    return ", ".join(parts)
