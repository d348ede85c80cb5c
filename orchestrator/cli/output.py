"""Output of the CLI: consoles, JSON, and numbers with units."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from holdfast.orchestrator import limits

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob

WIDE = 10_000
"""Columns of an output that is not a terminal: files and pipes get unwrapped lines, but where
COLUMNS is set."""

TEXTS = (
    "directory", "formula", "in", "incident", "outcome", "path", "settings", "source", "value",
    "what", "why", "why it lost",
)  # fmt: skip
"""Columns of tables that may be wrapped, to TEXT_WIDTH."""
TEXT_WIDTH, PADDING = 24, 3
STATE_STYLES = {
    "running": "green", "succeeded": "green", "member": "green", "train": "green",
    "pending": "cyan", "starting": "cyan", "finishing": "cyan", "joining": "cyan", "spare": "cyan",
    "recovering": "yellow", "suspending": "yellow", "suspended": "yellow", "suspect": "yellow",
    "failed": "bold red", "lost": "red", "hung": "bold red", "exited": "red", "cordoned": "red",
    "cancelled": "yellow", "unattended": "yellow",
}  # fmt: skip


def stdout() -> Console:
    """Console for results. Colours only on a terminal; NO_COLOR is respected."""
    return console(sys.stdout)


def stderr() -> Console:
    """Console for errors and remarks."""
    return console(sys.stderr)


def console(file: IO[str]) -> Console:
    """Console without markup, since texts of jobs may contain brackets."""
    width = None if file.isatty() or os.environ.get("COLUMNS") else WIDE
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width)


@contextmanager
def ignoring_closed_output() -> Iterator[None]:
    """A reader that has left, or a full disk, does not change the exit code of a job."""
    try:
        yield
    except (OSError, SystemExit):  # rich exits when a pipe is closed
        discard_output()


def discard_output() -> None:
    """Let the interpreter's last flush succeed: what is left in its buffer cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """One JSON document of plain values or msgspec structs."""
    import msgspec

    _print_json(msgspec.json.format(_json(value), indent=2).decode())


def print_json_line(value: Any) -> None:
    """One JSON document on one line, for streams."""
    _print_json(_json(value).decode())


def _print_json(text: str) -> None:
    """Escape what the output's encoding may lack."""
    if not str(sys.stdout.encoding).lower().startswith("utf"):
        text = re.sub(r"[^\0-\x7f]+", lambda found: json.dumps(found[0])[1:-1], text)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _json(value: Any) -> bytes:
    """A loss that is NaN becomes null: NaN is not valid JSON."""
    import msgspec

    return msgspec.json.encode(value)


class Columns(Table):
    """A table in the style of kubectl: upper-case headers, no lines. Texts are wrapped; where it is
    still wider than the output, columns are left out, in this order."""

    leaves_out: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for name in self.leaves_out:
            if sum(map(_least_width, self.columns)) - PADDING <= options.max_width:
                break
            self.columns = [c for c in self.columns if c.header != name.upper()]
            for number, column in enumerate(self.columns):
                column._index = number  # the last one has no padding
        yield from super().__rich_console__(console, options)


def _least_width(column: Column) -> int:
    width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return PADDING + (width if column.no_wrap else min(width, TEXT_WIDTH))


def columns(*names: str, leaves_out: Sequence[str] = ()) -> Columns:
    table = Columns(box=None, pad_edge=False, padding=(0, PADDING, 0, 0), header_style="bold")
    table.leaves_out = tuple(leaves_out)
    for name in names:
        wraps = name in TEXTS
        table.add_column(name.upper(), no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    return table


def state_text(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def duration(seconds: float) -> str:
    """`0.83 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 4 h`."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def without_controller(job: TrainingJob) -> str:
    """Time that agents train without a controller, outside of Kubernetes."""
    limit_s = job.spec.recovery.controller_absence_s
    if limit_s == "never":
        return "without limit"
    return f"for {duration(limits.CONTROLLER_ABSENCE_S if limit_s == 'auto' else limit_s)}"


def seconds(number: float) -> str:
    """Three digits and no exponent: `0.0123 s`, `4.71 s`, `4,620 s`."""
    return f"{number:,.0f} s" if number >= 100 else f"{number:.3g} s"


def size(num_bytes: float) -> str:
    """`512 B`, `1.2 MiB`, `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`, `8.0B`."""
    for limit, suffix in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B"), (1e15, "T")):
        if abs(number) < limit:
            scaled = number / (limit / 1e3)
            return f"{scaled:.0f}" if suffix == "" else f"{scaled:.1f}{suffix}"
    return f"{number:.1e}"


def clock(wall_ns: int) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / 1e9))


def date(wall_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_ns / 1e9))


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as a row of bars; empty for fewer than two values."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if len(finite) < 2:
        return ""
    if len(finite) > width:
        # Each bar is the mean of its bucket, so that the whole history fits.
        edges = [round(i * len(finite) / width) for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(finite), max(finite)
    bars = "▁▂▃▄▅▆▇█"
    span = high - low or 1.0
    return "".join(bars[min(7, int((v - low) / span * 8))] for v in finite)


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
