"""Output of rank 0 for the display of `holdfast run`: a thread follows its newest log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from ..runtime.job_directory import JobDirectory
from .log_files import LogTail, generations
from .output import plural

INTERVAL_S = 0.25
BAR_INTERVAL_S = 10.0
"""Seconds between two states of a progress bar that has not ended its line."""
LAST_S = 5.0
"""Limit for the last lines, where a cluster does not answer."""
MAX_LINES = 200
"""Lines shown in one interval; the last ones if there are more."""


class RankLines:
    """Shows lines that are written inside of the context, also by later generations."""

    def __init__(
        self,
        directory: JobDirectory,
        show: Callable[[str], None],
        refresh: Callable[[], object] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`refresh` brings the files of `directory` up to date, in the thread."""
        self._directory, self._show = directory, show
        self._refresh, self._interval_s = refresh, interval_s
        self._tail: LogTail | None = None
        self._generation = 0
        self._bar, self._bar_s = "", 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rank-lines", daemon=True)

    def __enter__(self) -> Self:
        self._refresh()
        for tail in self._newer():  # of a job that is attached to
            tail.skip()
            self._tail = tail
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """Shows the last lines."""
        self._ended.set()
        self._thread.join(LAST_S)

    def _follow(self) -> None:
        with suppress(OSError):  # as of `holdfast run FILE | head`, which trains to the end
            while not self._ended.wait(self._interval_s):
                self._poll()
            self._poll(last=True)

    def _poll(self, *, last: bool = False) -> None:
        self._refresh()
        for tail in self._newer():  # several, if a generation was short
            if self._tail is not None:
                self._print(self._tail, over=True)
            self._tail = tail
        if self._tail is not None:
            self._print(self._tail, over=last)

    def _newer(self) -> list[LogTail]:
        """Tails of the generations that came since the last look and have a log of rank 0."""
        newer = [number for number in generations(self._directory) if number > self._generation]
        paths = {number: self._directory.rank_log(number, 0) for number in newer}
        files = {number: path for number, path in paths.items() if path.exists()}
        self._generation = max(files, default=self._generation)
        return [LogTail(path, "") for path in files.values()]

    def _print(self, tail: LogTail, *, over: bool) -> None:
        lines = [line for part in tail.parts(all=over) for line in part]
        if (hidden := len(lines) - MAX_LINES) > 0:
            self._show(f"({plural(hidden, 'line')} not shown; see `holdfast logs`)")
        for line in lines[-MAX_LINES:]:
            self._show(line)
        self._bar_s = 0.0 if lines else self._bar_s + self._interval_s
        bar = tail.bar
        if bar and bar != self._bar and self._bar_s >= BAR_INTERVAL_S:
            self._bar, self._bar_s = bar, 0.0
            self._show(bar)
