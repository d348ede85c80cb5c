"""Identifies and watches processes that are not children of this one: pid, start time, pidfd."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A process, distinct from a later one with the same pid."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot: field 22 of /proc/PID/stat."""


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None when there is none or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command may contain spaces and parentheses, so parse after the last parenthesis.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else Identity(pid, int(fields[19]))


class Watch:
    """Calls back once, from the event loop, when a process ends. The pidfd makes sure that a kill
    never reaches another process."""

    def __init__(self, fd: int, identity: Identity, on_end: Callable[[], None]) -> None:
        self.identity = identity
        self._fd = fd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._ended)

    def _ended(self) -> None:
        self.close()
        self._on_end()

    def kill(self) -> None:
        if self._fd >= 0:
            try:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            except ProcessLookupError:
                return  # it has ended; the callback follows

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def watch(identity: Identity, on_end: Callable[[], None]) -> Watch | None:
    """Watch a process; None when it has ended already."""
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError as error:
        # The pid may be free, or belong to a thread now.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        raise
    # The comparison is safe only after the pidfd pins the process.
    if identify(identity.pid) != identity:
        os.close(fd)
        return None
    return Watch(fd, identity, on_end)
