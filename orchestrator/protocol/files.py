"""Files and paths: atomic replacement, paths of a spec, differences between fsspec stores."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRIVATE = 0o600
SHARED = 0o666
"""File modes; the umask of the process applies."""

BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "cos", "obs", "tos")
"""URL schemes of object stores. They have no directories: asked for one, their drivers create a
bucket, so a misspelt name would become a new bucket that costs money."""


@contextmanager
def replacing(path: Path, mode: int = SHARED) -> Iterator[Any]:
    """An unbuffered binary file that replaces `path` when the block ends without an error.

    A reader sees the old contents or all of the new ones, whenever the machine crashes; the new
    ones are durable when this returns. Raises OSError; then the old file is kept, or the new one
    has a name that may not survive a crash.
    """
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
    """The same as `replacing`, with the whole contents."""
    with replacing(path, mode) as file:
        write_all(file, data)


def read_small(system: Any, path: str, most: int) -> bytes:
    """The contents of a file, of a directory read without waiting for a FIFO. Raises ValueError for
    more than `most` bytes there, FileNotFoundError for what is not a file, and what the store's
    library raises."""
    if not is_local(system):
        return bytes(system.cat_file(path))
    info = system.info(path)
    if info["type"] != "file":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if info["size"] > most:
        raise ValueError(f"{info['size']} bytes; at most {most}")
    return bytes(system.cat_file(path))


def write_all(file: Any, data: bytes) -> None:
    """Write all of `data`: one write to an unbuffered file may take only a part."""
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


def resolve(directory: Path | str, *written: str) -> Path:
    """A path from a spec. Each part is relative to the one before, unless it is absolute or begins
    with ~ for the user's home directory. Raises FileNotFoundError if ~ names no such user."""
    path = Path(directory)
    for part in written:
        try:
            path /= Path(part).expanduser()
        except RuntimeError:  # no such user, or one without a home
            raise FileNotFoundError(errno.ENOENT, "no home is known here for its ~", part) from None
    return path


def fsspec_protocols(system: Any) -> tuple[str, ...]:
    """The URL schemes of an fsspec file system."""
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def make_directory(system: Any, path: str) -> None:
    """Make a directory and its parents on an fsspec file system that has directories."""
    if not any(scheme in BUCKETS for scheme in fsspec_protocols(system)):
        system.makedirs(path, exist_ok=True)


def is_local(system: Any) -> bool:
    """True if an fsspec file system is this machine's own."""
    return "file" in fsspec_protocols(system)
