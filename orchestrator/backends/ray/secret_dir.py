"""The directory of an agent's secrets: token, TLS key, where the controller listens.

Owns: that nobody else may read it, and that it does not outlive its job: a process that is killed
cannot remove its own, so the next one on that machine does, of whatever job. Must not: know what
the files mean.

A directory belongs to the process that holds a lock in it, which the kernel gives back however that
process ends. The lock is in place before it has its name, so what has that name and no owner is
left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK = "owner"
NAMES = f"holdfast-{'[0-9a-f]' * 16}-*"
"""Of a job's id, which only they have in their names."""


class PrivateDirectory:
    """One, for as long as this process lives or until `remove`."""

    def __init__(self, job_id: str, parent: Path | None = None) -> None:
        """Raises OSError."""
        parent = parent or Path(tempfile.gettempdir())
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"holdfast-{job_id}-", dir=parent))  # mode 0700
        unnamed = self.path / f".{LOCK}"
        self._lock = os.open(unnamed, os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def write(self, name: str, data: bytes) -> None:
        """Replaces the file as a whole."""
        temporary = self.path / f".{name}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        temporary.replace(self.path / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(parent: Path) -> None:
    """Remove those whose owner has ended."""
    for path in parent.glob(NAMES):
        # Somebody else's, or just being removed or made.
        with contextlib.suppress(OSError):
            # Anybody may put a pipe there, and opening one waits for its reader.
            lock = os.open(path / LOCK, os.O_WRONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
