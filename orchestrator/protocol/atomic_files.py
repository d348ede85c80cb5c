"""Files of a machine that outlive its crash: replaced whole, their names made durable.

Owns: the order of write, fsync, rename and fsync of the directory. Must not: know what is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRIVATE = 0o600
SHARED = 0o666
"""Less the umask of the process."""


@contextmanager
def replacing(path: Path, mode: int = SHARED) -> Iterator[Any]:
    """An unbuffered binary file that takes the name when the block ends without an error: a reader
    sees the old one or all of the new one, whenever the machine crashes; the new one from when this
    returns. Raises OSError, leaving the old one, or the new one with a name that may not last."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            yield file
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace(path: Path, data: bytes, mode: int = SHARED) -> None:
    """As `replacing`, for few bytes."""
    with replacing(path, mode) as file:
        write_all(file, data)


def write_all(file: Any, data: bytes) -> None:
    """An unbuffered file may take a part of it only."""
    view = memoryview(data)
    while view:
        written = file.write(view)
        view = view[written if written is not None else len(view) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
