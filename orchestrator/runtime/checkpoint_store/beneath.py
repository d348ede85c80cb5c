"""Files below a directory that others write to, for a process with more rights than they have.

Invariant: no symbolic link below that directory is followed, also one that takes a directory's
place meanwhile. Each call opens the directories of its path one by one, without following links,
and works in the last one by its descriptor. A link counts as a missing file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.spec import AbstractFileSystem

OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""The last one: a FIFO must not hold up the reader."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
MOST_READ_BYTES = 1 << 28
"""Bytes that one call reads. Manifests and headers are far smaller; a file may claim any size."""


class FilesBeneath(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system as far as a checkpoint store needs one. Paths are absolute."""

    protocol = "file"
    cachable = False

    def __init__(self, top: str) -> None:
        """`top`: the directory itself; links on the way to it are followed."""
        super().__init__()
        self._top = PurePosixPath(top)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(self._top).mkdir(parents=True, exist_ok=True)
        with self._directory(PurePosixPath(path), make=True):
            pass

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._parent(path) as (parent, name):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
        return {"name": path, "size": status.st_size, "type": kind, "mtime": status.st_mtime}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        with self._directory(PurePosixPath(path)) as directory, os.scandir(directory) as entries:
            paths = sorted(f"{path}/{entry.name}" for entry in entries)
        return [self.info(child) for child in paths] if detail else paths

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        with self._parent(path) as (parent, name), os.fdopen(_open(name, parent), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _not_followed(path)
            first = start or 0
            num_bytes = min(status.st_size, status.st_size if end is None else end) - first
            if num_bytes > MOST_READ_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            file.seek(first)
            return file.read(max(0, num_bytes))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Durable when it returns; a reader sees all of the old contents or of the new ones."""
        with self._parent(path) as (parent, name):
            temporary = f".{name}.{uuid.uuid4().hex}.tmp"
            fd = _open(temporary, parent, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(fd)
                os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            os.fsync(parent)

    def rm_file(self, path: str) -> None:
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)
            os.fsync(parent)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """A link is removed, not what it names."""
        if self.info(path)["type"] != "directory":
            self.rm_file(path)
            return
        with self._parent(path) as (parent, name):
            shutil.rmtree(name, dir_fd=parent)  # follows no link either

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        whole = PurePosixPath(path)
        with self._directory(whole.parent) as fd:
            yield fd, whole.name

    @contextlib.contextmanager
    def _directory(self, path: PurePosixPath, *, make: bool = False) -> Iterator[int]:
        """Descriptor. Raises FileNotFoundError for a link, ValueError for a path elsewhere."""
        names = path.relative_to(self._top).parts
        if ".." in names:
            raise ValueError(f"{path}: leaves {self._top}")
        # O_PATH: the root of a volume need not be readable to pass through it.
        fd = os.open(self._top, (os.O_PATH if names else DIRECTORY) | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=fd)
                child = _open(name, fd, DIRECTORY)
                os.close(fd)
                fd = child
            yield fd
        finally:
            os.close(fd)


def _open(name: str, directory: int, flags: int = os.O_RDONLY) -> int:
    try:
        return os.open(name, flags | OPEN, 0o666, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _not_followed(name) from None
        raise


def _not_followed(name: str) -> FileNotFoundError:
    text = "a symbolic link, which is not followed, or not a file or directory"
    return FileNotFoundError(errno.ENOENT, text, name)
