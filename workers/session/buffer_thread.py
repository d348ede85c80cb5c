"""Prepares staging buffers for copies from a device, in a thread: page-locking makes the pages
present and takes 0.5 to 1 s per GB, while training continues.

Until the requested buffers have come, this thread receives the agent's messages as well: the
training thread does so only when it stages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from holdfast.orchestrator.errors import HoldfastError
from holdfast.workers.checkpoint.layout import Bytes


class BufferThread:
    """Maps buffers, has them prepared, and hands them over."""

    def __init__(
        self,
        prepare: Callable[[Bytes], None],
        ready: Callable[[int, mmap.mmap], None],
        receive: Callable[[], None],
        connection: int,
    ) -> None:
        """`prepare` and then `ready` are called in the thread for each buffer, and `receive` when
        `connection` is readable and requested buffers have not come."""
        self._prepare, self._ready, self._receive = prepare, ready, receive
        self._connection = connection
        self._mapped: deque[tuple[int, int, int]] = deque()
        self._num_awaited = 0
        self._work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the thread has changed something that the training thread may wait for."""
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="holdfast-buffers", daemon=True).start()

    def expect(self, num_buffers: int) -> None:
        """Number of buffers that have been requested."""
        self._num_awaited += num_buffers
        os.eventfd_write(self._work, 1)

    def put(self, buffer: int, fd: int, num_bytes: int) -> None:
        """A buffer has come. Owns the file descriptor."""
        self._num_awaited = max(0, self._num_awaited - 1)
        self._mapped.append((buffer, fd, num_bytes))
        os.eventfd_write(self._work, 1)

    def read_done(self) -> None:
        """Raises the thread's error."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.done)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                wanted = [self._work, self._connection] if self._num_awaited else [self._work]
                if self._connection in select.select(wanted, [], [])[0]:
                    self._receive()
                    os.eventfd_write(self.done, 1)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._work)
                while self._mapped:
                    self._prepare_one(*self._mapped.popleft())
        except HoldfastError:
            return  # the agent is gone: the training thread finds the closed socket
        except BaseException as error:
            self._error = error
            os.eventfd_write(self.done, 1)

    def _prepare_one(self, buffer: int, fd: int, num_bytes: int) -> None:
        # Not MAP_POPULATE: mmap holds the interpreter's lock meanwhile, page-locking does not.
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        os.close(fd)
        self._prepare(np.frombuffer(memory, dtype=np.uint8))
        self._ready(buffer, memory)
        os.eventfd_write(self.done, 1)
