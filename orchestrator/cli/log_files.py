"""Finds, prints and follows the log files in a job directory."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from ..runtime.job_directory import JobDirectory

PART_BYTES = 1 << 20
"""Bytes of a log in memory at once; a longer line is split there."""


class LogTail:
    """Reads a file from its beginning and continues as it grows."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self._prefix = prefix
        self._offset = 0
        self._rest = b""
        self._begun = False

    def parts(self, *, all: bool = False) -> Iterator[list[str]]:
        """New complete lines, in batches; with `all` also a last line without a newline."""
        with suppress(OSError):
            if not self._begun or self.path.stat().st_size < self._offset:
                # Rotated, before or meanwhile: the unread rest of the older part comes first.
                with suppress(OSError):
                    yield from self._read(older_part(self.path))
                self._offset = 0
            self._begun = True
            yield from self._read(self.path)
        if all and self._rest:
            yield self._shown([self._rest])
            self._rest = b""

    def skip(self) -> None:
        """Skip the present content of the file."""
        self._begun = True
        with suppress(OSError):
            self._offset = self.path.stat().st_size

    @property
    def bar(self) -> str:
        """The state of a progress bar in the line that is not complete; empty: there is none."""
        return self._shown([self._rest])[0] if b"\r" in self._rest else ""

    def _read(self, path: Path) -> Iterator[list[str]]:
        with path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(PART_BYTES):
                self._offset += len(data)
                *whole, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > PART_BYTES:
                    whole.append(self._rest)
                    self._rest = b""
                yield self._shown(whole)

    def _shown(self, lines: list[bytes]) -> list[str]:
        return [self._prefix + folded(line).decode("utf-8", "replace") for line in lines]


class LogMissing(UserError):
    """No log is kept of what was asked for."""


def older_part(path: Path) -> Path:
    """File for the older content of a large log."""
    return path.with_name(f"{path.name}.1")


def folded(line: bytes) -> bytes:
    """A terminal would show what follows the last carriage return: the last state of a progress
    bar."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def print_files(
    directory: JobDirectory, rank: int | None, generation: int | None, node: str | None
) -> None:
    """Print the matching files one after the other: without a generation, those of each generation,
    oldest first, below a line that names it. Raises LogMissing when none matches."""
    numbers = generations(directory) if generation is None and node is None else []
    having = [number for number in numbers if rank is None or rank in _ranks(directory, number)]
    if len(having) < 2:
        generation_shown = having[0] if having else generation
        for tail in find(directory, rank, generation_shown, node):
            _write(tail, all=True)
        return
    for number in having:
        _print([heading(number)])
        for tail in find(directory, rank, number, None):
            _write(tail, all=True)


def follow_files(
    directory: JobDirectory,
    rank: int | None,
    generation: int | None,
    node: str | None,
    interval_s: float,
) -> None:
    """Print the matching files and what is appended, until the job has no controller. Without a
    generation, follow the newest one and those that come after it."""
    tails: dict[Path, LogTail] = {}
    first: int | None = None
    while True:
        # Before reading, so that the last lines of a job that ends now are printed.
        alive = directory.controller_alive()
        wanted = [generation]
        if generation is None:
            numbers = generations(directory)
            first = max(numbers, default=0) if first is None else first
            wanted = [number for number in numbers if number >= first] or [None]
        missing: LogMissing | None = None
        for number in wanted:
            try:
                for tail in find(directory, rank, number, node):
                    tails.setdefault(tail.path, tail)
            except LogMissing as error:  # this generation lacks the rank, or has no log yet
                missing = error
        if missing is not None and not alive and not tails:
            raise missing
        for tail in tails.values():
            _write(tail, all=not alive)
        if not alive:
            return
        time.sleep(interval_s)


def find(
    directory: JobDirectory, rank: int | None, generation: int | None, node: str | None
) -> list[LogTail]:
    """The matching files. Raises LogMissing when none matches."""
    if node is not None:
        path = directory.logs / f"agent-{node}.log"
        if not path.is_file():
            names = sorted(p.stem[len("agent-") :] for p in directory.logs.glob("agent-*.log"))
            raise LogMissing.of("--node", node, one_of(names, "node"))
        return [LogTail(path, "")]
    if not (numbers := generations(directory)):
        raise LogMissing(f"job {directory.name}: there are no logs yet")
    generation = numbers[-1] if generation is None else generation
    if generation not in numbers:
        names = [str(number) for number in numbers]
        raise LogMissing.of("--generation", str(generation), one_of(names, "generation"))
    ranks = _ranks(directory, generation)
    if rank is None:
        width = len(str(max(ranks, default=0)))
        return [LogTail(path, f"[{number:>{width}}] ") for number, path in ranks.items()]
    if rank not in ranks:
        names = [str(number) for number in ranks]
        raise LogMissing.of("--rank", str(rank), one_of(names, "rank"))
    return [LogTail(ranks[rank], "")]


def generations(directory: JobDirectory) -> list[int]:
    """Generations with a directory of logs, oldest first."""
    return sorted(
        int(match[1])
        for path in directory.logs.glob("gen-*")
        if (match := re.fullmatch(r"gen-(\d+)", path.name))
    )


def _ranks(directory: JobDirectory, generation: int) -> dict[int, Path]:
    """Rank -> its log file."""
    folder = directory.rank_log(generation, 0).parent
    return {
        int(match[1]): path
        for path in sorted(folder.glob("rank-*.log"))
        if (match := re.fullmatch(r"rank-(\d+)\.log", path.name))
    }


def heading(generation: int) -> str:
    return f"== generation {generation} =="


def one_of(known: list[str], noun: str) -> str:
    if not known:
        return f"a {noun} with a log; there are no logs yet"
    return "one of " + ", ".join(known)


def _write(tail: LogTail, *, all: bool) -> None:
    for lines in tail.parts(all=all):
        if lines:
            _print(lines)


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
