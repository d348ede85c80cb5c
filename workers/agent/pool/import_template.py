"""A process that imports the modules of `spec.preload` and those that workers of the script
imported, once per node, and forks workers with them for the forkserver, which goes on meanwhile.

It is not the forkserver: that one reaps the workers that run, and has to outlive an import that
starts threads, opens CUDA, hangs or crashes. A process that has threads or has opened CUDA must not
fork. A template whose import does that ends; the next one leaves the module, and what that imports,
to the standbys. What it forks is a child of the forkserver.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from holdfast.orchestrator.api.v1alpha1 import TrainingJob

from ..linux import output, processes
from ..process import process_env
from . import fork_protocol, user_modules

SETTINGS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables with which an import starts no thread (jemalloc of pyarrow, which transformers imports
with datasets) and opens no CUDA (torch.cuda.is_available, which torchao and accelerate call)."""

FORK_TIME_S = 10.0
"""A template that does not answer for so long is ended."""

RunWorker = Callable[[fork_protocol.ForkWorker, Sequence[int]], NoReturn]
"""Function of a new worker, for its request and its descriptors."""


class ImportTemplate:
    """The forkserver's side of one template."""

    def __init__(
        self, job: TrainingJob, modules: Sequence[str], left_out: frozenset[str], run: RunWorker
    ) -> None:
        """Fork it, without the modules in `left_out`. The caller must not have threads."""
        self.modules = tuple(modules)
        self.ready = False
        self._installed = _installed()
        self.waiting: list[tuple[fork_protocol.ForkWorker, list[int]]] = []
        """Requests with their descriptors, until it is ready."""
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output.flush()  # after the fork both processes would write what is buffered
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                processes.die_with(server)
                processes.name_process("imports")
                os.setsid()
                self.link.close()
                _serve(theirs, job, modules, left_out, run, server)
            finally:
                os._exit(1)
        theirs.close()

    def ranks_waiting(self) -> list[tuple[fork_protocol.ForkWorker, list[int]]]:
        """Waiting requests of workers that have ranks."""
        return [entry for entry in self.waiting if entry[0].local_rank < 0]

    def serves(self, modules: Sequence[str]) -> bool:
        """True if the template has, or will have, these modules as they are installed now."""
        return set(self.modules).issuperset(modules) and self._installed == _installed()

    def fork(
        self, request: fork_protocol.ForkWorker, fds: Sequence[int]
    ) -> fork_protocol.Forked | fork_protocol.NotForked:
        """Have a ready template fork; milliseconds. The forkserver waits for the answer, so that it
        takes no new worker for an orphan. Raises OSError if the template does not answer."""
        fork_protocol.send(self.link, request, tuple(fds))
        self.link.settimeout(FORK_TIME_S)
        answer, _fds = fork_protocol.receive(self.link)
        if not isinstance(answer, fork_protocol.Forked | fork_protocol.NotForked):
            raise BrokenPipeError("it ended")
        return answer

    def kill(self) -> None:
        """Kill the template without waiting for its end: an import may hang in a file system."""
        self.link.close()
        for send, target in ((os.killpg, self.pid), (os.kill, self.pid)):
            with contextlib.suppress(ProcessLookupError):  # also before it has its group
                send(target, signal.SIGKILL)


def _installed() -> int:
    """Changes when a package is installed, replaced or removed."""
    return Path(sysconfig.get_path("purelib")).stat().st_mtime_ns


# -- in the template --------------------------------------------------------------------------
def _serve(
    link: socket.socket,
    job: TrainingJob,
    modules: Sequence[str],
    left_out: frozenset[str],
    run: RunWorker,
    server: int,
) -> NoReturn:
    process_env.adopt(job.spec.env)  # libraries read it when they are imported
    unset = [name for name in SETTINGS if name not in os.environ]
    os.environ.update({name: SETTINGS[name] for name in unset})
    for name in modules:
        if name in sys.modules or name in left_out:
            continue
        before = set(sys.modules)
        user_modules.import_if_possible(name)
        if problem := user_modules.cannot_fork():
            names = (name, *sorted(set(modules) & (set(sys.modules) - before - {name})))
            fork_protocol.send(link, fork_protocol.ImportLeftOut(modules=names, problem=problem))
            os._exit(0)
    for name in unset:
        del os.environ[name]
    gc.collect()
    gc.freeze()  # the collector would copy the pages that the workers share
    fork_protocol.send(link, fork_protocol.ImportsReady())
    while True:
        request, fds = fork_protocol.receive(link)
        if request is None:
            os._exit(0)
        assert isinstance(request, fork_protocol.ForkWorker)
        fork_protocol.send(link, _fork(request, fds, run, server))
        for fd in fds:
            os.close(fd)


def _fork(
    request: fork_protocol.ForkWorker, fds: list[int], run: RunWorker, server: int
) -> fork_protocol.Forked | fork_protocol.NotForked:
    """Fork twice: when the process between has ended, the worker is a child of the forkserver,
    which adopts orphans."""
    output.flush()
    reads, writes = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                os.write(writes, _fork_worker(request, fds, run, server).to_bytes(8, "big"))
            finally:
                os._exit(0)
    except OSError as error:
        os.close(reads)
        return fork_protocol.NotForked(worker=request.worker, detail=f"fork: {error.strerror}")
    finally:
        os.close(writes)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(reads, 8), "big")
    os.close(reads)
    if not pid:
        return fork_protocol.NotForked(worker=request.worker, detail="fork: it failed")
    return fork_protocol.Forked(worker=request.worker, pid=pid)


def _fork_worker(
    request: fork_protocol.ForkWorker, fds: list[int], run: RunWorker, server: int
) -> int:
    between = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            while os.getppid() == between:
                os.sched_yield()
            processes.die_with(server)
            run(request, fds)
        finally:
            os._exit(1)
    return pid
