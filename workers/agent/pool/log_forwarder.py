"""Copies the output of workers to the output of the agent, each line with its rank and generation.

Used when the controller names no directory for logs (Welcome.log_directory is "-"), as in pods:
the kubelet keeps and rotates the output, while files would fill the pod's disk or, on tmpfs, its
memory. Each line names its generation: a heading would be lost when the kubelet rotates the output.
Threads copy, so that the agent never blocks: if the container runtime does not read the output,
they wait, and then the workers that print.
"""

from __future__ import annotations

import io
import os
import threading
import time

from holdfast.orchestrator.protocol import files

TO_OUTPUT = "-"
"""Value of Welcome.log_directory: no files."""
READ_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024
"""Longer lines (a progress bar without newlines) are cut, at the limit of containerd."""
FINISH_TIMEOUT_S = 1.0
TAIL_BYTES = 16 * 1024
"""Kept of each worker's output, for the attribution of a SIGABRT."""


class LogForwarder:
    """Copies from pipes to a descriptor, line by line, each pipe in a thread."""

    def __init__(self, target: int = 1) -> None:
        self._target = io.FileIO(target, "w", closefd=False)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._tails: dict[int, bytes] = {}
        """Rank -> its last output."""

    def pipe(self, generation: int, rank: int) -> int:
        """The writing end of a new pipe; the caller passes it to a worker and closes it."""
        read, write = os.pipe2(os.O_CLOEXEC)
        pipe = (read, rank, b"[rank %d, gen %d] " % (rank, generation))
        thread = threading.Thread(target=self._copy, args=pipe, name="holdfast-logs", daemon=True)
        thread.start()
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]
        return write

    def last_output(self, rank: int) -> str:
        """The end of what the workers with this rank have printed."""
        return self._tails.get(rank, b"").decode(errors="replace")

    def finish(self) -> None:
        """All writing ends are closed: copy the rest, for at most FINISH_TIMEOUT_S."""
        until_s = time.monotonic() + FINISH_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _copy(self, fd: int, rank: int, prefix: bytes) -> None:
        rest = b""
        with io.FileIO(fd) as pipe:
            while part := pipe.read(READ_BYTES):
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._write(rank, part, [prefix + line + b"\n" for line in lines])
        if rest:
            self._write(rank, b"", [prefix + rest + b"\n"])

    def _write(self, rank: int, part: bytes, lines: list[bytes]) -> None:
        with self._lock:
            self._tails[rank] = (self._tails.get(rank, b"") + part)[-TAIL_BYTES:]
            files.write_all(self._target, b"".join(lines))
