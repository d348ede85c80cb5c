"""The script of a worker runs again in its process when a peer has died: imports, caches and the
context of a GPU stay, and the script reads its state as in a new process.

Invariant: what a script usually changes of its process is as before it, or the process ends and
another one takes its seat. What it has changed within installed libraries is not known.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
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
import typing
import warnings
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator import limits
from holdfast.workers import worker_protocol, worker_transport

from ..linux import output, processes
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
_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and set something of the whole process."""


class Process:
    """A process as it was before its script ran."""

    def __init__(self, channel: AgentChannel, runs: CodeType) -> None:
        """`channel`: of this process; `runs`: the function that runs the script. Needs torch, which
        the forkserver has."""
        from holdfast.workers.session.attempts import Attempts

        self._channel = channel
        self.attempts = Attempts.of_script = Attempts(None, "", runs)
        self._threads, self._exits = set(threading.enumerate()), list[Callable[..., Any]]()
        self._functions, collects = _functions_of_torch(), gc.isenabled()
        settings = [*_settings_of_python(), *_settings_of_torch(), *_signals()]
        self._before = [(setting, setting[0]()) for setting in settings]
        self._collect = gc.enable if collects else gc.disable
        self._note_exits()
        channel.halt, channel.is_over = self.attempts.halt, lambda: self.attempts.halting
        channel.when_training = self._report

    def _note_exits(self) -> None:
        """Note the exit functions that are registered from now on."""
        register = atexit.register

        def register_noted(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
            self._exits.append(function)
            return register(function, *given, **named)

        self._before.append((_attribute(atexit, "register"), register))
        vars(atexit)["register"] = register_noted

    def _report(self) -> None:
        """Say that the script may run again, unless a thread of it will stay, such as a logger's.
        Those of loaders end with them."""
        if all(any(name in t.name for name in LOADERS) for t in self._new_threads()):
            self._channel.send(worker_protocol.RunsAgain())

    def _new_threads(self) -> list[threading.Thread]:
        new = set(threading.enumerate()) - self._threads
        return [thread for thread in new if type(thread).__name__ not in HARMLESS_THREADS]

    def next_run(self) -> worker_transport.Attached:
        """Remove the script from this process, and wait for a seat in the next generation. Raises
        AgentGone; the process ends where something stays."""
        output.flush()
        try:
            why = self._why_not()
        except Exception as error:  # of a library's private function
            why = f"{type(error).__name__}: {error}"
        if why:
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
                print(f"holdfast: the script does not run again here: {why}", file=sys.stderr)
            output.flush()
            self._channel.send(worker_protocol.KeepReported(why_not=why))
            time.sleep(2 * limits.HALT_S)  # the agent kills this process
            os._exit(1)
        self._channel.phase, type(self.attempts).of_script = "start", None
        if not self.attempts.seated:
            return self._channel.next_seat(worker_protocol.Halted(step=-1, runs_again=True))
        assert worker_transport.attached is not None
        process_env.adopt(worker_transport.attached.assign.environment)
        return worker_transport.attached

    def _why_not(self) -> str:
        """Have the process be as before the script. Returns a reason why it is not."""
        changed = self._changed()
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for (read, write), before in self._before:
            if not _equal(read(), before):
                write(before)
        for module, variable in OWN_GROUPS.items():
            if getattr(sys.modules.get(module), variable, None) is not None:
                return f"{module} keeps its process groups"
        if self._channel.prepares_buffers or changed:
            return f"the script has replaced {changed}" if changed else "a thread prepares buffers"
        _forget_libraries()
        self._forget_script()
        for child in multiprocessing.active_children():  # of loaders
            child.kill()
            child.join()
        return self._left()

    def _forget_script(self) -> None:
        """Drop the script's own modules, which are read again, and what it has registered."""
        own = _own_packages()
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        libraries = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
        for function in self._exits:
            if str(getattr(function, "__module__", "")).partition(".")[0] not in libraries:
                atexit.unregister(function)
        self._exits.clear()
        for name, logger in logging.Logger.manager.loggerDict.items():  # each line would come twice
            if name.partition(".")[0] not in libraries and isinstance(logger, logging.Logger):
                logger.handlers.clear()

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

    def _left(self) -> str:
        """Something of the script that stays in this process; empty: nothing."""
        trackers = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
        if set(processes.children()) - trackers:
            return "child processes of the script still run"
        until_s = time.monotonic() + THREADS_END_S
        while left := self._new_threads():
            if time.monotonic() > until_s:
                return f"thread {left[0].name} of the script still runs"
            time.sleep(0.01)
        for _ in range(COLLECTIONS):
            gc.collect()
            if not (stays := _has_optimizer()):
                break
        self._collect()
        return "an optimizer of the script stays in memory" if stays else ""


# -- settings -------------------------------------------------------------------------------------
def _attribute(owner: Any, name: str) -> _Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _sequence(values: list[Any]) -> _Setting:
    return lambda: list(values), lambda before: values.__setitem__(slice(None), before)


def _mapping(values: Any) -> _Setting:
    return lambda: dict(values), lambda before: (values.clear(), values.update(before))


def _signals() -> list[_Setting]:
    def setting(number: int) -> _Setting:
        return lambda: signal.getsignal(number), lambda before: signal.signal(number, before)

    return [setting(number) for number in signal.valid_signals()]


def _settings_of_python() -> list[_Setting]:
    names = ("stdin", "stdout", "stderr", "excepthook", "argv")
    return [
        *(_attribute(sys, name) for name in names),
        _attribute(builtins, "print"),
        _attribute(warnings, "showwarning"),
        _sequence(sys.path),
        _sequence(logging.root.handlers),
        _attribute(logging.root, "level"),
        _mapping(os.environ),
        (lambda: os.sched_getaffinity(0), lambda before: os.sched_setaffinity(0, before)),
        (random.getstate, random.setstate),
    ]


def _settings_of_torch() -> list[_Setting]:
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = [
        _mapping(values)
        for owner in (module, optimizer)
        for name, values in vars(owner).items()
        if name.startswith("_global_") and isinstance(values, dict)
    ]
    safe = torch.serialization

    def set_safe_globals(before: list[Any]) -> None:
        safe.clear_safe_globals()
        safe.add_safe_globals(before)

    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, torch.set_default_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.get_rng_state, torch.set_rng_state),
        (lambda: list(safe.get_safe_globals()), set_safe_globals),
        *hooks,
    ]


def _equal(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


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


# -- what the script has left ---------------------------------------------------------------------
def _forget_libraries() -> None:
    """Drop what libraries, and our patches of them, keep of a training in their modules."""
    from holdfast.workers.session import groups, reporting

    groups.forget()
    reporting.forget()
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    if (patches := sys.modules.get("holdfast.workers.integrations.patches")) is not None:
        patches.forget()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    if "torch.distributed.tensor" in sys.modules:  # its results have the old meshes
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    for clear in getattr(typing, "_cleanups", ()):  # of classes in annotations
        clear()


def _own_packages() -> set[str]:
    """Outermost names of the script's own modules: not of Python, Holdfast or an installed package,
    which is in a folder for packages or has native parts, which cannot be loaded twice."""
    places: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        folders = getattr(spec, "submodule_search_locations", None) or ()
        origin = getattr(spec, "origin", None)
        places.setdefault(name.partition(".")[0], []).extend([origin] if origin else folders)
    return {
        name
        for name, files in places.items()
        if name not in ("__main__", "holdfast")
        and any(file.startswith(os.sep) for file in files)
        and not any(
            "-packages" in file or file.endswith(".so") or file.startswith(_STDLIB)
            for file in files
        )
    }


def _has_optimizer() -> bool:
    """An optimizer is left, with all that it refers to. Proxies of libraries are not asked."""
    kind = sys.modules["torch"].optim.Optimizer
    return any(issubclass(type(thing), kind) for thing in gc.get_objects())
