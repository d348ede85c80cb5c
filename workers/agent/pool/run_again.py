"""The script of a worker runs again in its process when a peer has died: imports, caches and the
context of a GPU stay, and the script reads its state as in a new process.

Invariant: the script finds what it found the first time, or the process ends and another one takes
its seat. What installed libraries keep for themselves, and this file does not name, stays.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator import limits
from holdfast.workers import worker_protocol, worker_transport

from ..linux import processes
from ..process import process_env

if TYPE_CHECKING:
    from holdfast.workers.session.agent_channel import AgentChannel

THREADS_END_S = 0.3
"""Seconds for the script's threads to end after it; the agent waits for limits.HALT_S."""
COLLECTIONS = 3
"""Tensors that C++ owned survive the first collection of the garbage that refers to them."""
HARMLESS_THREADS = ("TMonitor",)
"""tqdm's, which only refreshes bars that have not moved."""
LOADERS = ("QueueFeederThread", "_pin_memory_loop")
"""Parts of the names of threads that a DataLoader starts."""
OWN_GROUPS = {"deepspeed.comm.comm": "cdb", "megatron.core.parallel_state": "_MODEL_PARALLEL_GROUP"}
"""Module that keeps process groups -> its variable that is None before it has some."""
_INSTALLED = tuple(sysconfig.get_path(n) for n in ("purelib", "platlib", "stdlib", "platstdlib"))


class Process:
    """This process as it was before the script, which `channel` reports on."""

    def __init__(self, channel: AgentChannel, runs: CodeType) -> None:
        """`runs`: the function that runs the script. Needs torch, which the forkserver has."""
        from holdfast.workers.session.attempts import Attempts

        self._channel = channel
        self.attempts = Attempts.of_script = Attempts(None, "", runs)
        self._environment, self._path = dict(os.environ), list(sys.path)
        self._modules, self._threads = set(sys.modules), set(threading.enumerate())
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._streams = (sys.stdin, sys.stdout, sys.stderr, sys.excepthook, sys.argv)
        self._handlers, self._level = list(logging.root.handlers), logging.root.level
        self._collects, self._functions = gc.isenabled(), _functions_of_torch()
        self._random, self._torch = random.getstate(), _state_of_torch()
        channel.halt, channel.is_over = self.attempts.halt, lambda: self.attempts.halting
        channel.when_training = self._report

    def _report(self) -> None:
        """Say that the script may run again, unless a thread of it will stay, such as a logger's.
        Those of loaders end with them."""
        if all(any(name in t.name for name in LOADERS) for t in self._new_threads()):
            self._channel.send(worker_protocol.RunsAgain())

    def _new_threads(self) -> list[threading.Thread]:
        new = set(threading.enumerate()) - self._threads
        return [thread for thread in new if type(thread).__name__ not in HARMLESS_THREADS]

    def next_run(self) -> worker_transport.Attached:
        """Leave nothing of the script, and wait for a seat in the next generation. Raises
        AgentGone; the process ends where something stays."""
        try:
            why = self._restored()
        except Exception as error:  # of a library's private function
            why = f"{type(error).__name__}: {error}"
        if why:
            print(f"holdfast: this process does not run the script again: {why}", file=sys.stderr)
            self._channel.send(worker_protocol.KeepReported(why_not=why))
            time.sleep(2 * limits.HALT_S)  # the agent kills this process
            os._exit(1)
        self._channel.phase, type(self.attempts).of_script = "start", None
        if not self.attempts.seated:
            return self._channel.next_seat(worker_protocol.Halted(step=-1, runs_again=True))
        assert worker_transport.attached is not None
        process_env.adopt(worker_transport.attached.assign.environment)
        return worker_transport.attached

    def _restored(self) -> str:
        """Have the process be as before the script. Returns a reason why it is not."""
        from holdfast.workers.session import groups, reporting

        if self._channel.prepares_buffers:
            return "a thread prepares its buffers"
        if changed := self._changed():
            return f"{changed} is another function"
        for module, variable in OWN_GROUPS.items():
            if getattr(sys.modules.get(module), variable, None) is not None:
                return f"{module} keeps its process groups"
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        sys.stdin, sys.stdout, sys.stderr, sys.excepthook, sys.argv = self._streams
        sys.path[:] = self._path
        os.environ.clear()
        os.environ.update(self._environment)
        groups.forget()
        reporting.forget()
        _forget_frameworks()
        _forget_modules()
        self._forget_loggers()
        for child in multiprocessing.active_children():  # of loaders
            child.kill()
            child.join()
        for _ in range(COLLECTIONS):
            gc.collect()
            if not self.attempts.models:
                break
        (gc.enable if self._collects else gc.disable)()
        random.setstate(self._random)
        for read, write, before in self._torch:
            if not _equal(read(), before):
                write(before)
        return self._left()

    def _changed(self) -> str:
        """A function of torch that the script has replaced, and would wrap once more. torch itself
        replaces some, for its compiler."""
        now, ours = _functions_of_torch(), str(Path(sys.modules["torch"].__file__ or "").parent)
        for name, before in self._functions.items():
            function: Any = now.get(name)
            code = getattr(function, "__code__", None)
            if function is not before and not (code and code.co_filename.startswith(ours)):
                return name
        return ""

    def _forget_loggers(self) -> None:
        """Drop handlers of the script's loggers: it would have each line twice."""
        logging.root.handlers[:] = self._handlers
        logging.root.setLevel(self._level)
        for name, logger in logging.Logger.manager.loggerDict.items():
            if name.partition(".")[0] not in sys.modules and isinstance(logger, logging.Logger):
                logger.handlers.clear()

    def _left(self) -> str:
        """Something that the script has left, in words; empty: nothing."""
        trackers = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
        if set(processes.children()) - trackers:
            return "child processes of the script still run"
        until_s = time.monotonic() + THREADS_END_S
        while left := self._new_threads():
            if time.monotonic() > until_s:
                return f"thread {left[0].name} of the script still runs"
            time.sleep(0.01)
        return "model of the script stays in memory" if self.attempts.models else ""


def _functions_of_torch() -> dict[str, object]:
    """Functions that scripts replace, and whose results the training depends on."""
    import torch

    owners: list[Any] = [torch.nn.functional, torch.Tensor, torch.nn.Module]
    owners += [torch.utils.data.DataLoader, *vars(torch.optim).values()]
    return {
        f"{owner.__name__}.{name}": function
        for owner in owners
        if isinstance(owner, type) or owner is torch.nn.functional
        for name, function in vars(owner).items()
        if callable(function) and not isinstance(function, type)
    }


def _state_of_torch() -> list[tuple[Callable[[], Any], Callable[[Any], object], Any]]:
    """(reads, writes, value) of what holds in the whole process."""
    import torch

    both: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, torch.set_default_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    return [(read, write, read()) for read, write in both]


def _equal(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def _forget_frameworks() -> None:
    """Drop what frameworks, and our patches of them, keep of a training in their modules."""
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    if (patches := sys.modules.get("holdfast.workers.integrations.patches")) is not None:
        patches.forget()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    if "torch.distributed.tensor" in sys.modules:  # its results have the old meshes
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def _forget_modules() -> None:
    """Drop the script's own modules, so that they are read again."""
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        ours = name.partition(".")[0] in ("holdfast", "__main__")
        if origin.startswith(os.sep) and not (ours or origin.startswith(_INSTALLED)):
            del sys.modules[name]
