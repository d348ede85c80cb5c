"""Processes of this machine that are not our children: who they are, and when they end.

Owns: process identity (pid and start time) and pidfd watching. Must not: know nodes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A process, told apart from a later one with the same pid."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot: field 22 of /proc/PID/stat."""


def identify(pid: int) -> Identity | None:
    """The process that has this pid now; None when there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command may contain spaces and parentheses; what follows the last one is regular.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else Identity(pid, int(fields[19]))


class Watch:
    """Calls back once, from the event loop, when a process ends. Holds a pidfd, so that a kill can
    never hit another process."""

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
                return  # it ended by itself; the callback is on its way

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
        # Its pid may be free again, or that of a thread by now.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return None
        raise
    # Only now that the pidfd pins the process is the comparison conclusive.
    if identify(identity.pid) != identity:
        os.close(fd)
        return None
    return Watch(fd, identity, on_end)
