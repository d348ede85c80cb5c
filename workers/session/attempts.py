"""Attempts at a step, and halts of a process that survives the loss of a peer: of an attempt, or of
a whole script, which runs again (agent/pool/run_again.py).

The agent halts a worker by a byte on the inspection socket. The pulse thread then closes the
connections of the process groups, which ends a collective, and signals the main thread, which ends
Python code, until the attempt is over. Invariant: of a script with attempts that can be kept, only
an attempt is interrupted, and nothing of the session's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from inspect import CO_GENERATOR
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import UserError
from holdfast.workers.agent.pool.failures import is_secondary
from holdfast.workers.checkpoint.layout import hash_bytes
from holdfast.workers.checkpoint.stage import flat_bytes
from holdfast.workers.checkpoint.state import local_of

from .groups import Groups, cut
from .inspection import num_collectives

SIGNAL = signal.SIGRTMIN + 7
SIGNAL_EVERY_S = 0.02
UNINTERRUPTED = (
    "torch._dynamo.convert_frame", "torch._dynamo.guards", "torch._inductor.compile_fx",
    "importlib._bootstrap", "torch.serialization", "zipfile", "holdfast.workers.packets",
)  # fmt: skip
"""Modules that change global state, such as anomaly detection, during a call, or drop errors, or
that end an archive well whatever is missing in it."""


class AttemptHalted(BaseException):
    """Ends an attempt whose generation is stopped. Not an Exception: scripts catch those."""


class Attempts:
    """The attempts of one process."""

    of_script: ClassVar[Attempts | None] = None
    """Attempts of a script that may run again in this process."""

    def __init__(
        self, groups: Groups | None, why_not: str, runs_again: CodeType | None = None
    ) -> None:
        """`why_not`: why this process cannot be kept; empty: it can, as far as is known."""
        self.groups, self.why_not = groups, why_not
        self.runs_again = runs_again
        """Code of the function that runs the script, if the script may run again: all of it may be
        interrupted, unless its attempts can be kept."""
        self.said: str | None = None
        """Reason why it is not kept, as the agent knows it; None: the agent knows nothing."""
        self.wanted = False
        """The agent may keep this process."""
        self.failed = False
        """The last attempt was halted."""
        self.seated = False
        """The script has a seat already in which it runs again."""
        self._collectives: int | None = None
        """Number of this process's collectives when its last attempt ended, or at its restore."""
        self.rehearses = False
        """The attempt is one without peers, whose result is dropped."""
        self.num_graphs: int | None = None
        """Compiled graphs after this process's first step."""
        self._random: tuple[int, int] | None = None
        """Digests of the states of random numbers, as they are if none are drawn."""
        self._watches = self._seeded = False
        self._acting = threading.Lock()
        self._halting, self._over = threading.Event(), threading.Event()
        self._open = self._stepped = False
        self._begun_in: FrameType | None = None
        """The frame of the script whose `with` has the open attempt."""
        self._shields = self._outside = 0
        self._listen()

    def _listen(self) -> None:
        """Have the signal interrupt the main thread."""
        self._listens = self.groups is not None or self.runs_again is not None
        if self._listens and threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._on_signal)

    def in_session(self, groups: Groups | None, why_not: str) -> Attempts:
        """The script calls session.init."""
        self.groups, self.why_not = groups, why_not
        self._listen()
        return self

    @property
    def halting(self) -> bool:
        """The generation is over."""
        return self._halting.is_set()

    @property
    def over(self) -> bool:
        """The last attempt was halted, or the generation is over."""
        return self.failed or self.halting

    @property
    def is_open(self) -> bool:
        return self._open

    # -- of the agent ---------------------------------------------------------------------------
    def halt(self) -> None:
        """End the attempt, from the pulse thread; the agent kills a process that takes long."""
        self._over.clear()
        self._halting.set()
        until, main = time.monotonic() + 2 * limits.HALT_S, threading.main_thread().ident
        while self._listens and main is not None and time.monotonic() < until:
            with self._acting:
                if self._over.is_set():
                    return  # the connections of the next generation may be there
                if self.groups is not None and self.wanted:
                    self.groups.cut()
                else:
                    cut(None)
                signal.pthread_kill(main, SIGNAL)
            self._over.wait(SIGNAL_EVERY_S)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        script = None if self.wanted else self.runs_again
        again, within = script is not None, script is None
        if not self.halting or self._over.is_set() or not (self._open or again) or self._shields:
            return
        while frame is not None and (again or frame is not self._begun_in):
            # What a context manager has half entered would stay so, and a generator would be over
            # for the next attempt, too. The signal comes again.
            if frame.f_code.co_name in ("__enter__", "__exit__", "__del__"):
                return
            generates = frame.f_code.co_flags & CO_GENERATOR and not again
            if generates and frame.f_code.co_name != "<genexpr>":
                return
            if frame.f_globals.get("__name__") in UNINTERRUPTED:
                return  # one that takes long ends with its process
            within = within or frame.f_code is script
            frame = frame.f_back
        if not within:
            return
        self._open = False
        raise AttemptHalted

    def ends_script(self, error: BaseException) -> bool:
        """True if this error of the script is due to a halt, so that it may run again."""
        if self.runs_again is None or self.wanted:
            return False
        if not (self.halting or self._is_lost(error)):
            return False
        self.halted()
        _clear_globals(error.__traceback__)
        drop_frames(error)
        self.groups = None
        return True

    def resumed(self) -> None:
        """This process has a seat in the next generation."""
        self._halting.clear()
        self.failed = self.wanted = False
        self.said = None

    # -- of the loop ----------------------------------------------------------------------------
    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Context that is not interrupted within an attempt. Raises AttemptHalted after it."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self.halting and self._open and not self._shields:
            self._open = False
            raise AttemptHalted

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A part of the loop that belongs to no attempt; its error does not halt the attempt."""
        opened, self._open = self._open, False
        try:
            yield
        except BaseException as error:
            self._outside = id(error)  # the error itself would keep frames alive
            raise
        finally:
            self._open = opened

    def expect_running(self) -> None:
        """Raises AttemptHalted, again, if the script has caught that it is to end: what it has
        computed is torn."""
        if self.halting and self.runs_again is not None and not self.wanted:
            raise AttemptHalted

    def expect_open(self, step: int, *, is_last: bool) -> None:
        # A script may have caught a collective's error. In the last step a peer may have left.
        if self.wanted and self.groups is not None and not is_last and not self.groups.whole:
            with self.shielded():
                self._halting.wait(2 * limits.HALT_S)
        if (self.halting and self.wanted) or self.rehearses:
            raise AttemptHalted  # again, if the script has caught it
        if not self._open:
            raise UserError(
                f"session.step: got step {step} outside an attempt; expected it within `with "
                "s.attempt():` in a loop over s.steps"
            )
        self._stepped = True

    def expect_stepped(self, step: int) -> None:
        if not self._stepped:
            raise UserError(
                f"session.steps: got no s.step({step}) in the body of the loop; expected `with "
                "s.attempt():`, and at its end s.step(step)"
            )

    def begin(self, *, first: bool, kept: bool) -> None:
        """A step of the loop begins; `first`: of the generation. Once processes were `kept`, each
        step is watched: they and new ones would draw different random numbers without s.seed."""
        self._stepped, self._watches = False, self.groups is not None and (first or kept)
        self._seeded = self._seeded and not self._watches
        if self._watches and first:
            self._random = _random_state()

    def seeds(self) -> None:
        """s.seed is called."""
        self.look_at_random()
        self._seeded = self._seeded or self._watches

    def look_at_random(self, *, leaves: bool = False) -> None:
        """Say in `why_not` whether random numbers were drawn without s.seed. `leaves`: the process
        leaves its generation."""
        if self._random is not None and (self._watches or leaves):
            now, before = _random_state(), int(self._seeded)
            if now[before:] != self._random[before:]:
                self.why_not = self.why_not or "an attempt draws random numbers without s.seed"
            self._random = now

    def halted(self) -> None:
        """Nothing is cut or interrupted from now on."""
        with self._acting:
            self._over.set()

    def count_collectives(self) -> None:
        """Begin a time in which collectives are the script's: up to the next attempt."""
        self._collectives = num_collectives() if self.groups is not None else None

    def __enter__(self) -> None:
        if self._open:
            raise UserError("session.attempt: got an attempt within one; expected one in each step")
        if self._collectives is not None and num_collectives() > self._collectives:
            # New processes would wait in them for kept ones, which are in their loop.
            self.why_not = self.why_not or "the script has collectives outside its attempts"
        self._open, self._begun_in = True, sys._getframe(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self._open, self._begun_in = False, None
        self.count_collectives()
        if self.rehearses and isinstance(error, Exception | AttemptHalted | None):
            halted = True
        elif error is None or not self.wanted or self._outside == id(error):
            halted = False
        else:
            halted = isinstance(error, AttemptHalted) or self._is_lost(error)
        if halted:
            drop_frames(error)
            self.failed = True
        return halted

    def _is_lost(self, error: BaseException) -> bool:
        """True if a peer is lost, and a halt follows: the connection to a dead peer breaks before
        the agent knows of its end."""
        return is_secondary(error) and self._halting.wait(limits.HALT_WAIT_S)


def _clear_globals(traceback: TracebackType | None) -> None:
    """Functions of the script that something refers to would keep its model alive."""
    while traceback is not None:
        names = traceback.tb_frame.f_globals
        traceback = traceback.tb_next
        if names.get("__name__") == "__main__":
            names.clear()


def drop_frames(error: BaseException | None) -> None:
    """Frames keep the tensors of a broken forward alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def reset(model: Module, groups: Groups, modes: list[bool]) -> None:
    """The model as it is before a forward, whatever was interrupted: an evaluation, too. `modes`:
    whether each module trains."""
    for module, trains in zip(model.modules(), modes, strict=True):
        module.training = trains
    for module in _roots(model):
        module.reset_iter_state()
    groups.reset()
    for parameter in model.parameters():
        parameter.grad = None


def _roots(model: Module) -> list[Any]:
    """FSDP2's roots. A module becomes one in its first forward; before, it has nothing to reset."""
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [module for module in sharded if module._get_fsdp_state()._is_root]


def _random_state() -> tuple[int, int]:
    """Digests of the states of what s.seed sets, and of numpy's."""
    seeded = hash((random.getstate(), torch.get_rng_state().numpy().tobytes()))
    numpy: Any = sys.modules.get("numpy")
    return seeded, hash(pickle.dumps(numpy.random.get_state(legacy=False))) if numpy else 0


def versions(model: Module) -> dict[str, Any]:
    """State that a forward may change and checkpoints lack: the number of writes to each buffer
    that they leave out, the modules' own numbers, and which parameters are trained."""
    buffers = {
        f"{name}.{key}": module._buffers[key]._version
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set
        if module._buffers.get(key) is not None
    }
    numbers = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if not isinstance(module, DistributedDataParallel)
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and key != "training" and key[0] != "_"
    }
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return buffers | numbers | trained


def settings_digest(optimizers: Iterable[Optimizer]) -> int:
    """Digest of the numbers in all parameter groups, such as the learning rate; below 2**56."""
    values = [
        (key, float(value) if isinstance(value, Tensor) else value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in sorted(group.items())
        if isinstance(value, (bool, int, float, str, tuple))
        or (isinstance(value, Tensor) and value.numel() == 1)
    ]
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=7).digest())


def why_not(model: Module, before: dict[str, Any]) -> str:
    """Reason to replace this process; empty: none. `before`: `versions` at restore."""
    now = versions(model)
    if changed := next((name for name in before | now if before.get(name) != now.get(name)), ""):
        return f"the model changes {changed.strip('.')}, which checkpoints do not have"
    if threading.current_thread() is not threading.main_thread():
        return "the loop does not run in the main thread"
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            facts: Any = module
            if facts.static_graph or facts._get_ddp_logging_data().get("comm_hook"):
                return "DDP has a static graph or a communication hook"
            if getattr(facts, "_use_python_reducer", False):
                return "DDP has a reducer in Python"
        if isinstance(module, FSDPModule):
            shared: Any = module._get_fsdp_state()
            parts = getattr(shared, "_fsdp_param_groups", [])
            if any(getattr(part, "_all_reduce_hook", None) for part in parts):
                return "FSDP2 has a hook for its all-reduce"
    if not all(hasattr(root, "reset_iter_state") for root in _roots(model)):
        return "this torch cannot reset FSDP2 after an error (2.15 can)"
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.GradientState().num_steps > 1:
        return "accelerate counts micro-batches"
    if num_graphs("compiled_autograd", "captures"):
        return "autograd is compiled"
    return ""


def num_graphs(kind: str = "stats", name: str = "unique_graphs") -> int:
    """Graphs that torch.compile has compiled in this process, or those of another kind."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters[kind][name] if dynamo is not None else 0


def checksum(parameters: Iterable[Tensor]) -> int:
    """Checksum of the bits of this rank's parts; below 2**62."""
    total = 0
    for parameter in parameters:
        for plain in _plain(local_of(parameter).detach()):
            total = (total * 31 + hash_bytes(flat_bytes(plain))) % 2**62
    return total


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors inside one of a subclass, such as a quantized weight."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))
