"""Copies the output of workers to the output of the agent, each line with its rank and generation.

Used when the controller names no directory for logs (Welcome.log_directory is "-"), as in pods:
the kubelet keeps and rotates the output, while files would fill the pod's disk or, on tmpfs, its
memory. Each line names its generation: a heading would be lost when the kubelet rotates the output.
A thread copies, so that the agent never blocks: if the container runtime does not read the output,
this thread waits, and then the workers that print.
"""

from __future__ import annotations

import io
import os
import selectors
import threading
from typing import NamedTuple

from holdfast.orchestrator.protocol import files

TO_OUTPUT = "-"
"""Value of Welcome.log_directory: no files."""
READ_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024
"""Longer lines (a progress bar without newlines) are cut, at the limit of containerd."""
FINISH_TIMEOUT_S = 1.0
TAIL_BYTES = 16 * 1024
"""Kept of each worker's output, for the attribution of a SIGABRT."""


class _WorkerPipe(NamedTuple):
    """The worker at the writing end of a pipe."""

    rank: int
    prefix: bytes


class LogForwarder:
    """Copies from pipes to a descriptor, line by line."""

    def __init__(self, target: int = 1) -> None:
        self._target = io.FileIO(target, "w", closefd=False)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._new: list[tuple[int, _WorkerPipe]] = []
        self._lock = threading.Lock()
        self._partial_lines: dict[int, bytes] = {}
        self._tails: dict[int, bytes] = {}
        """Rank -> its last output."""
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
        self._thread.start()

    def pipe(self, generation: int, rank: int) -> int:
        """The writing end of a new pipe; the caller passes it to a worker and closes it."""
        read, write = os.pipe2(os.O_CLOEXEC)
        with self._lock:
            self._new.append((read, _WorkerPipe(rank, b"[rank %d, gen %d] " % (rank, generation))))
        os.write(self._wake, b"x")
        return write

    def last_output(self, rank: int) -> str:
        """The end of what the workers with this rank have printed."""
        return self._tails.get(rank, b"").decode(errors="replace")

    def finish(self) -> None:
        """All writing ends are closed: copy the rest, for at most FINISH_TIMEOUT_S."""
        self._ending = True
        os.write(self._wake, b"x")
        self._thread.join(FINISH_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            for key, _mask in self._selector.select():
                if key.data is None:
                    os.read(self._wake_read, READ_BYTES)
                    self._adopt()
                else:
                    self._copy(key.fd, key.data)
            if self._ending and not self._partial_lines:
                return

    def _adopt(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for fd, pipe in new:
            self._partial_lines[fd] = b""
            self._selector.register(fd, selectors.EVENT_READ, pipe)

    def _copy(self, fd: int, pipe: _WorkerPipe) -> None:
        part = os.read(fd, READ_BYTES)
        self._tails[pipe.rank] = (self._tails.get(pipe.rank, b"") + part)[-TAIL_BYTES:]
        lines = (self._partial_lines[fd] + part).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES or (not part and rest):
            lines.append(rest)
            rest = b""
        if lines:
            files.write_all(self._target, b"".join(pipe.prefix + line + b"\n" for line in lines))
        if part:
            self._partial_lines[fd] = rest
        else:
            self._selector.unregister(fd)
            os.close(fd)
            del self._partial_lines[fd]
