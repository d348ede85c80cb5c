"""stdout and stderr of agents and workers. Writing to them never fails: a full disk below the logs
must not end a process that holds training state."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from holdfast.orchestrator import limits


class LossyFile(io.FileIO):
    """A descriptor for writing. What a full disk or a closed pipe refuses is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def stream(fd: int, errors: str) -> TextIO:
    """A text stream to `fd`, flushed at each line; `errors` as in `str.encode`."""
    buffered = io.BufferedWriter(LossyFile(fd, "w", closefd=False))
    return io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, line_buffering=True)


def never_fail() -> None:
    """Replace sys.stdout and sys.stderr of this process and of those that it forks."""
    flush()
    sys.stdout = stream(1, "backslashreplace")
    sys.stderr = stream(2, "backslashreplace")


def flush() -> None:
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            output.flush()


def log_descriptor(path: str) -> int:
    """The log file at `path`, for appending; /dev/null where it cannot be created."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def rotate(path: Path, bound_bytes: int = limits.LOG_BYTES) -> bool:
    """Move the content of a log that is larger than `bound_bytes` to `PATH.1`, which is replaced.
    Its writer keeps the file open for appending, so the content is copied and the file truncated;
    lines that are written in between are lost. Returns whether it was rotated. Raises nothing: the
    directory may be deleted meanwhile, and a log is not worth a node."""
    try:
        size = path.stat().st_size if path.is_file() else 0
        if size <= bound_bytes:
            return False
        _copy(path, path.with_name(f"{path.name}.1"), size)
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def _copy(path: Path, older: Path, size: int) -> None:
    try:
        with path.open("rb") as source, older.open("wb") as target:
            at = 0
            while at < size:  # one call copies 2 GiB at most
                at += os.sendfile(target.fileno(), source.fileno(), at, size - at)
    except OSError:  # no room for the copy: keep the bound all the same
        with contextlib.suppress(OSError):
            older.unlink(missing_ok=True)


def old_generations(newest: Path, keep: int = limits.LOG_GENERATIONS) -> list[Path]:
    """Directories `gen-N` beside `newest` that are not among the `keep` newest."""
    numbers = {path: path.name.removeprefix("gen-") for path in newest.parent.glob("gen-*")}
    last = int(newest.name.removeprefix("gen-")) - keep
    return [path for path, number in numbers.items() if number.isdigit() and int(number) <= last]
