"""Ends a process at its n-th change of the file system, as SIGKILL or a power failure does.

A change is a call that creates, writes, renames, deletes or syncs. A write counts as several
changes: before it, and with a part of its bytes written. On a power failure the process also takes
away what the kernel does not promise to keep: bytes of a file that was not synced since, and, with
`Loss.NAMES`, names in a directory that was not synced since.
"""

from __future__ import annotations

import enum
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

STOPPED = 9
"""Exit status of a process that was ended at a change."""


class Loss(enum.Enum):
    NOTHING = "the process is killed"
    BYTES = "power failure: bytes that were not synced are lost"
    NAMES = "power failure: bytes and names that were not synced are lost"


class Changes:
    """Changes of this process, from `watch` on. `stop_at` 0: it only counts them."""

    def __init__(self, stop_at: int = 0, loss: Loss = Loss.NOTHING) -> None:
        self.count = 0
        self._stop_at, self._loss = stop_at, loss
        self._unsynced: dict[int, int] = {}
        """Inode -> a descriptor of a file with bytes that were not synced."""
        self._undo: list[tuple[str, Callable[[], None]]] = []
        """(directory, what takes its unsynced change back), oldest first."""
        self._os: dict[str, Any] = {
            name: getattr(os, name)
            for name in ("open", "fsync", "replace", "rename", "unlink", "remove", "mkdir",
                         "rmdir", "fdopen")
        }  # fmt: skip

    def watch(self) -> None:
        """Watch from now on. There is no way back: a forked process calls it."""
        for name in self._os:
            setattr(os, name, getattr(self, f"_{name}"))

    def point(self) -> None:
        self.count += 1
        if self.count == self._stop_at:
            self._end()

    def _end(self) -> NoReturn:
        if self._loss is not Loss.NOTHING:
            for fd in self._unsynced.values():
                os.ftruncate(fd, 0)
        if self._loss is Loss.NAMES:
            self.take_back_names()
        os._exit(STOPPED)

    def take_back_names(self) -> None:
        for name, original in self._os.items():
            setattr(os, name, original)
        for _directory, undo in reversed(self._undo):
            undo()

    # -- the calls -------------------------------------------------------------------------------
    def _open(self, path: Any, flags: int, *args: Any, **more: Any) -> int:
        creates = bool(flags & os.O_CREAT) and not Path(path).exists()
        if creates:
            self.point()
        fd: int = self._os["open"](path, flags, *args, **more)
        if creates:
            self._undo.append((_parent(path), lambda: Path(path).unlink(missing_ok=True)))
        return fd

    def _fdopen(self, fd: int, mode: str = "r", *args: Any, **more: Any) -> Any:
        if mode == "wb":
            return _Stream(self, fd)
        return self._os["fdopen"](fd, mode, *args, **more)

    def wrote(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if inode not in self._unsynced:
            self._unsynced[inode] = os.dup(fd)

    def _fsync(self, fd: int) -> None:
        self.point()
        self._os["fsync"](fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self._undo = [one for one in self._undo if one[0] != str(path)]
        else:
            kept = self._unsynced.pop(os.fstat(fd).st_ino, None)
            if kept is not None:
                os.close(kept)

    def _replace(self, source: Any, target: Any, **more: Any) -> None:
        self.point()
        old = Path(target).read_bytes() if Path(target).exists() else None
        self._os["replace"](source, target, **more)

        def undo() -> None:
            self._os["replace"](target, source)
            if old is not None:
                Path(target).write_bytes(old)

        self._undo.append((_parent(target), undo))

    _rename = _replace

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        at = _at(path, dir_fd)
        if at.exists():
            self.point()
            old = at.read_bytes()
            self._undo.append((str(at.parent), lambda: _put_back(at, old)))
        self._os["unlink"](path, dir_fd=dir_fd)

    _remove = _unlink

    def _mkdir(self, path: Any, *args: Any, **more: Any) -> None:
        if not Path(path).exists():
            self.point()
            self._undo.append((_parent(path), lambda: shutil.rmtree(path, ignore_errors=True)))
        self._os["mkdir"](path, *args, **more)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        at = _at(path, dir_fd)
        self.point()
        self._os["rmdir"](path, dir_fd=dir_fd)
        self._undo.append((str(at.parent), lambda: at.mkdir(exist_ok=True)))


class _Stream(io.FileIO):
    """A file whose writes are changes."""

    def __init__(self, changes: Changes, fd: int) -> None:
        super().__init__(fd, "wb")
        self._changes = changes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for num_bytes in sorted({0, 1, len(view) // 2, len(view) - 1}):
            if self._changes.count + 1 == self._changes._stop_at and num_bytes > 0:
                super().write(view[:num_bytes])
                self._changes.wrote(self.fileno())
            self._changes.point()
        written = super().write(view)
        self._changes.wrote(self.fileno())
        return written or 0


def _parent(path: Any) -> str:
    return str(Path(path).absolute().parent)


def _at(path: Any, dir_fd: int | None) -> Path:
    """`shutil.rmtree` deletes below an open directory."""
    if dir_fd is None:
        return Path(path).absolute()
    return Path(f"/proc/self/fd/{dir_fd}").readlink() / os.fsdecode(path)


def _put_back(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
