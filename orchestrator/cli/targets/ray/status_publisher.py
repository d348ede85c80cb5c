"""A display that also tells Ray's Jobs view how the job is.

Owns: the words, and when they are worth a write. Must not: know where they are written.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from holdfast.orchestrator.backends.ray.jobs_page import JobsPageEntry
from holdfast.orchestrator.cli.display import PROGRESS_INTERVAL_S, Display, progress_line
from holdfast.orchestrator.cli.output import plural
from holdfast.orchestrator.runtime.observe.view import JobView


class StatusPublisher:
    """Implements Display around another one."""

    def __init__(self, display: Display, entry: JobsPageEntry) -> None:
        self._display, self._entry = display, entry
        self._facts: dict[str, str] = {}
        self._told_ns = 0

    def show(self, view: JobView) -> None:
        self._display.show(view)
        facts = metadata(view)
        due = view.now_ns - self._told_ns >= PROGRESS_INTERVAL_S * 1e9
        if facts != self._facts or due:
            self._entry.tell(message(view), facts)
            self._facts, self._told_ns = facts, view.now_ns

    def note(self, text: str) -> None:
        self._display.note(text)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._display.__exit__(kind, error, trace)


def message(view: JobView) -> str:
    """One line: what the column `Status message` has room for comes first."""
    progress = f": {progress_line(view)}" if view.step >= 0 else ""
    why = f" ({view.reason})" if view.reason and view.state != "running" else ""
    return f"{view.state}{progress}{why}"


def metadata(view: JobView) -> dict[str, str]:
    """What changes seldom."""
    members = sum(node.state == "member" for node in view.nodes)
    facts: dict[str, str] = {"state": view.state}
    if view.mesh:
        facts["mesh"] = f"{view.strategy}: {view.mesh}"
    if members and view.world_size:
        workers = plural(view.world_size, "worker")
        facts["now"] = f"{workers} on {plural(members, 'node')}, generation {view.generation}"
    if view.num_incidents:
        facts["incidents"] = str(view.num_incidents)
    return facts
