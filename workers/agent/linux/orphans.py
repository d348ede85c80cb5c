"""Ends the processes that ended ones have left behind, and which this process has adopted.

Programs whose task is to remove a dead process's shared memory get CLEAN_UP_S for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path

from . import processes

CLEAN_UP_S = 4.0
"""torch_shm_manager removes files 2 s after its last client has ended (SHUTDOWN_TIMEOUT in torch's
manager.cpp). The next workers do not wait for it."""
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")
"""Names used by multiprocessing (and loky) and by torch's sharing strategy file_system."""


class Orphans:
    """The adopted processes of this one. `spares`: whether a child is not one of them."""

    def __init__(self, spares: Callable[[int], bool]) -> None:
        self._spares = spares
        self.selector = selectors.EpollSelector()
        """Readable when `reap` has something to do; of one pidfd for each process."""
        self._due_s: dict[int, float] = {}
        """Pid -> when it is killed; infinity: it was."""

    def end(self) -> tuple[str, ...]:
        """Kill all but those that clean up. Returns the command lines of the programs."""
        programs, own = [], _command_line(os.getpid())
        for pid in processes.children():
            if pid in self._due_s or self._spares(pid):
                continue
            command = _command_line(pid)
            is_program = command not in (b"", own)
            cleans_up = is_program and any(name in command for name in _CLEANERS)
            if is_program and not cleans_up:
                programs.append(command.replace(b"\0", b" ").decode(errors="replace").strip())
            if not cleans_up:
                _send(pid, signal.SIGKILL)
            self.watch(pid, time.monotonic() + CLEAN_UP_S if cleans_up else math.inf)
        return tuple(programs)

    def watch(self, pid: int, due_s: float = math.inf) -> None:
        """Reap a child when it ends."""
        self._due_s[pid] = due_s
        self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def due_in_s(self) -> float | None:
        """Latest time to call `reap`; None: no limit."""
        due_s = min(self._due_s.values(), default=math.inf)
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic())

    def reap(self, wait_s: float | None = 0.0) -> None:
        """Reap those that have ended, kill those that clean up for too long, and end what the ended
        ones have left behind."""
        ended = self.selector.select(wait_s)
        for key, _mask in ended:
            self.selector.unregister(key.fileobj)
            os.close(key.fd)
            os.waitpid(key.data, 0)
            del self._due_s[key.data]
        for pid, due_s in self._due_s.items():
            if due_s <= time.monotonic():
                _send(pid, signal.SIGKILL)
                self._due_s[pid] = math.inf
        if ended:
            self.end()

    def wait(self) -> None:
        """Return when none is left."""
        while self._due_s:
            self.reap(self.due_in_s())


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_line(pid: int) -> bytes:
    """Empty: it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
