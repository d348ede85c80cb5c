"""transformers' Trainer with its state in the memory of the nodes: after a failure it resumes with
the next step, as a loop of one's own with the session does.

The trainer keeps its loop. Before the loop the session restores what the trainer has built; after
each step it stages it. The trainer's own checkpoints (`save_steps`) are written as before.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset
from transformers import Trainer, set_seed
from transformers.trainer_callback import ExportableState, TrainerState

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.facts import WorkerPhase
from holdfast.workers import session
from holdfast.workers.session import reporting
from holdfast.workers.session.attempts import checksum
from holdfast.workers.session.order import mix

from .fixed_size import ROOM_BYTES, pack, to_json, unpack

_FIELDS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric",
    "best_global_step", "best_model_checkpoint",
)  # fmt: skip
"""Fields of TrainerState that are kept. The others follow from the arguments."""

_HOOKS = (
    "_init_training_state", "_prepare_for_training", "_run_epoch", "_maybe_log_save_evaluate",
    "_finalize_training", "_load_rng_state", "_save_checkpoint", "get_batch_samples",
)  # fmt: skip
"""Methods that this module extends; transformers 5 has them."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, FunctionType, ModuleType)

_IN_MEMORY = "memory of the nodes"
"""Text in place of a checkpoint's path: the trainer skips the batches that it has trained."""


class InMemoryTrainer(Trainer):  # type: ignore[misc]
    """`class MyTrainer(InMemoryTrainer, SFTTrainer)`, or InMemoryTrainer itself, in place of
    Trainer; `in_memory(trainer)` does the same for a trainer that exists.

    Random generators are seeded in each step, from (seed, step, rank), so that random numbers
    continue after a restore. Under torchrun it trains the same, and keeps nothing in memory.
    """

    control: Any
    _tr_loss: Any
    _session: session.Session | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
        """Same as `Trainer.train`, but resumes from memory or storage if either has a newer state
        than `resume_from_checkpoint`.

        Raises UserError for what cannot be kept: a second call, and searches for hyperparameters
        or batch sizes.
        """
        _expect_possible(self)
        self._session = s = session.init()
        self._stepped, self._held, self._loss, self._began_s = -1, -1, None, 0.0
        self._generation = s.generation
        resume = None if s.restoring else resume_from_checkpoint
        return super().train(resume, *args, **more)

    # -- before the loop ------------------------------------------------------------------------
    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> Any:
        state = super()._init_training_state(max_steps, steps_per_epoch, *args)
        if not self._joined.restoring:
            return state
        self.state.global_step = self._joined.next_step
        return self._place(steps_per_epoch)

    def _place(self, steps_per_epoch: int) -> tuple[int, int]:
        """The epoch of the next step, and its batches that are trained."""
        epoch, steps = divmod(self.state.global_step, steps_per_epoch)
        batches = steps * self.args.gradient_accumulation_steps
        return epoch, 0 if self.args.ignore_data_skip else batches

    def _prepare_for_training(self, *args: Any) -> Any:
        model, loader = super()._prepare_for_training(*args)
        s, kept = self._joined, _KeptOfTrainer(self)
        self._stepped = s.restore(model, self.optimizer, kept, start=self.state.global_step) - 1
        self._own_state = _state_of_parts(self) if s.may_keep else {}
        return model, loader

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Generators are seeded in each step."""

    # -- the loop -------------------------------------------------------------------------------
    def _run_epoch(self, **given: Any) -> None:
        """An epoch, and earlier ones again if a kept process goes on in one of them."""
        first, last, again = given["epoch"], given["epoch"], False
        for _ in self._joined.loops(partial(self._why_not_again, given["train_dataloader"])):
            with self._joined.attempt():
                if self._joined.generation != self._generation:
                    first, batches = self._begin_again(given["num_update_steps_per_epoch"])
                    given.update(epochs_trained=first, steps_trained_in_current_epoch=batches)
                    again = True
                for epoch in range(first, last + 1):
                    if epoch > first or again:
                        self.control = self.callback_handler.on_epoch_begin(
                            self.args, self.state, self.control
                        )
                    self._run_whole_epoch(**given | {"epoch": epoch})
                    if self.control.should_training_stop:
                        break

    def _begin_again(self, steps_per_epoch: int) -> tuple[int, int]:
        """Set what the trainer sets before its loop; return where it goes on."""
        self._generation, step = self._joined.generation, self.state.global_step
        self._stepped, self._held = step - 1, -1
        self._tr_loss, self._total_loss_scalar = torch.zeros_like(self._tr_loss), 0.0
        self._globalstep_last_logged = self._initial_global_step = step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self.current_flos, self._began_s = 0, time.time()
        for flag in vars(self.control):
            setattr(self.control, flag, False)
        self.accelerator.gradient_state.dataloader_references = [None]
        return self._place(steps_per_epoch)

    def _why_not_again(self, loader: Any) -> str:
        """Reason why the loop cannot begin again in this process; empty: it can."""
        for part, digest in _state_of_parts(self).items():
            if digest != self._own_state.get(part):
                return f"{part[1]} of the trainer or a callback changes: checkpoints lack it"
        return _why_other_order(loader)

    def _run_whole_epoch(self, **given: Any) -> None:
        if self._joined.restoring:
            if self.state.global_step >= self.state.max_steps:  # it was stopped after its last step
                self.control.should_training_stop = True
                return
            given["resume_from_checkpoint"] = _IN_MEMORY
        given["start_time"] = max(given["start_time"], self._began_s)
        seed = mix(self.args.seed, -1 - given["epoch"], 0) % 2**32
        if _has_persistent_workers(loader := given["train_dataloader"]):
            # Only new workers draw a seed, which would change the order below.
            loader.base_dataloader.generator = torch.Generator().manual_seed(seed)
        # Some samplers draw their order from the global generator, the same on all ranks.
        set_seed(seed)
        super()._run_epoch(**given)

    def get_batch_samples(self, *args: Any, **more: Any) -> Any:
        batches = super().get_batch_samples(*args, **more)
        rank = self._joined.data_parallel_rank
        set_seed(mix(self.args.seed, self.state.global_step, rank) % 2**32)
        return batches

    def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **more: Any) -> None:
        """The trainer calls it after each step, and once more at the end of an epoch: then what
        that call logs and evaluates belongs to the step."""
        steps = self.state.global_step - self._globalstep_last_logged
        if steps > 0:
            self._loss = tr_loss.detach() / steps  # the trainer sets tr_loss to 0
        super()._maybe_log_save_evaluate(tr_loss, *args, **more)
        step = self.state.global_step - 1
        stops = self.control.should_epoch_stop or self.control.should_training_stop
        epoch_ends = stops or float(self.state.epoch or 0).is_integer()
        if step == self._stepped or (epoch_ends and self._held != step):
            self._held = step
            return
        self._stepped = step
        self._joined.step(step, loss=self._loss, total_steps=self.state.max_steps)

    def evaluate(self, *args: Any, **more: Any) -> Any:
        with self._phase("evaluate"):
            return super().evaluate(*args, **more)

    def predict(self, *args: Any, **more: Any) -> Any:
        with self._phase("evaluate"):
            return super().predict(*args, **more)

    def prediction_step(self, *args: Any, **more: Any) -> Any:
        reporting.progress("evaluate")
        return super().prediction_step(*args, **more)

    def _save_checkpoint(self, *args: Any, **more: Any) -> Any:
        with self._joined.phase("save"):
            return super()._save_checkpoint(*args, **more)

    def _finalize_training(self, trial: Any, num_samples: int, start_time: float) -> Any:
        self._joined.finish()  # before the best model takes the place of the last one
        # The trainer divides the steps of this generation by it.
        return super()._finalize_training(trial, num_samples, max(start_time, self._began_s))

    def _phase(self, name: WorkerPhase) -> AbstractContextManager[None]:
        """Report the phase, also while a script evaluates before it trains."""
        return self._session.phase(name) if self._session is not None else reporting.phase(name)

    @property
    def _joined(self) -> session.Session:
        assert self._session is not None
        return self._session


def in_memory(trainer: Any) -> Any:
    """Keeps the state of `trainer`, a Trainer or an object of a subclass, in the nodes' memory:

        trainer = in_memory(Trainer(model, arguments, train_dataset=data))
        trainer.train()

    Returns the same object. Raises UserError for another object.
    """
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"holdfast.integrations.in_memory: got {type(trainer).__name__}; expected a "
            "transformers.Trainer; keep the state of another loop with session.restore"
        )
    kind = type(trainer)
    if not isinstance(trainer, InMemoryTrainer):
        trainer.__class__ = type(kind.__name__, (InMemoryTrainer, kind), {})
    return trainer


class _KeptOfTrainer:
    """State of a checkpoint beside tensors: the schedule, the scaler of mixed precision, and the
    trainer's own state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, scaler = self.trainer, self.trainer.accelerator.scaler
        return {
            "schedule": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "trainer": _packed(trainer),
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer = self.trainer
        trainer.lr_scheduler.load_state_dict(kept["schedule"])
        if kept["scaler"] and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(kept["scaler"])
        state = unpack(kept["trainer"])
        for name in _FIELDS:
            setattr(trainer.state, name, state[name])
        trainer.state.log_history = _history(trainer, state["logs"], state["older_logs"])
        for callback, attributes in zip(_stateful(trainer), state["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)


def _packed(trainer: Any) -> str:
    """The trainer's state, with as many of the newest logs as fit."""
    state = {name: getattr(trainer.state, name) for name in _FIELDS}
    state["callbacks"] = [callback.state().get("attributes", {}) for callback in _stateful(trainer)]
    logs = trainer.state.log_history
    num = min(256, len(logs))
    while True:
        newest = {"logs": logs[len(logs) - num :], "older_logs": num < len(logs)}
        text = to_json(state | newest)
        if len(text) <= ROOM_BYTES or not num:
            return pack(text)
        num //= 2


def _history(trainer: Any, newest: list[Any], older: bool) -> list[Any]:
    """Logs that did not fit are taken from the newest checkpoint of the trainer that has them and
    can be read. A restore does not fail for them: nothing looks for torn checkpoints before it, and
    a node may have none."""
    first = newest[0]["step"] if newest else trainer.state.global_step + 1
    for path in _states_of_checkpoints(Path(trainer.args.output_dir)) if older else ():
        try:
            before = TrainerState.load_from_json(str(path)).log_history
            return [entry for entry in before if entry["step"] < first] + newest
        except (OSError, ValueError, TypeError, KeyError):  # torn, or gone
            continue
    return newest


def _states_of_checkpoints(folder: Path) -> list[Path]:
    """The newest one first."""
    paths = folder.glob("checkpoint-*/trainer_state.json")
    steps = {path.parent.name.removeprefix("checkpoint-"): path for path in paths}
    return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int, reverse=True)]


def _stateful(trainer: Any) -> list[Any]:
    callbacks = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


@cache
def _names_of_trainer() -> frozenset[str]:
    """Attributes that transformers' Trainer and this module set."""
    text = Path(inspect.getfile(Trainer)).read_text() + Path(__file__).read_text()
    return frozenset(re.findall(r"\bself\.(\w+)", text))


def _state_of_parts(trainer: Any) -> dict[tuple[int, str], str]:
    """Digests of what a subclass, a callback or the arguments have, which no checkpoint has."""
    names = vars(trainer).keys() - _names_of_trainer() | {"compute_loss_func", "data_collator"}
    callbacks = trainer.callback_handler.callbacks
    unkept = [part for part in callbacks if not isinstance(part, ExportableState)]
    parts = [(trainer, {name: vars(trainer)[name] for name in names})]
    parts += [(part, vars(part)) for part in (trainer.args, *filter(_is_foreign, unkept))]
    own = {id(trainer), *map(id, _parts_of_model(trainer))}
    return {
        (number, f"{type(part).__name__}.{name}"): digest
        for number, (part, attributes) in enumerate(parts)
        for name, value in attributes.items()
        if (digest := _digest(value, own))
    }


def _parts_of_model(trainer: Any) -> Iterator[object]:
    for model in (trainer.model, trainer.model_wrapped):
        yield from (*model.modules(), *model.parameters(), *model.buffers())


def _digest(value: object, own: set[int]) -> str:
    """Digest of all that a value refers to, but for `own` parts and those of the frameworks'
    classes; tensors and models of torch count. Empty: there is nothing."""
    digest, parts, seen, num = hashlib.blake2b(), [value], {}, 0
    while parts:
        part = parts.pop()
        if id(part) in own or id(part) in seen:
            continue
        if isinstance(part, torch.Generator):
            part = part.get_state()
        if isinstance(part, Tensor):
            text = str(checksum([part]))
        elif isinstance(part, Module) or _is_foreign(part):
            text = repr(part) if isinstance(part, _PLAIN) else type(part).__name__
            if not isinstance(part, _PLAIN):
                seen[id(part)] = part  # alive, so that no other one gets its id
                parts += _inside(part)
        else:
            continue
        digest.update(f"{text};".encode(errors="replace"))
        num += 1
    return digest.hexdigest() if num else ""


def _inside(part: Any) -> list[object]:
    """Parts of an object, as pickle finds them."""
    if isinstance(part, dict):
        return [*part, *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(part)
    try:
        state = part.__reduce_ex__(4)
    except Exception:  # of a lock, a file, a function
        return [repr(part), getattr(part, "__dict__", {})]
    return [list(inner) if isinstance(inner, Iterator) else inner for inner in state]


def _is_foreign(part: object) -> bool:
    """True for an object of a user's class, or of another library's."""
    return type(part).__module__.partition(".")[0] not in ("torch", "accelerate", "transformers")


def _has_persistent_workers(loader: Any) -> bool:
    return hasattr(loader, "base_dataloader") and loader.persistent_workers


def _why_other_order(loader: Any) -> str:
    """Reason why a loader would give other samples when it is begun again; empty: it would not."""
    if _has_persistent_workers(loader):
        return "persistent workers of the data loader outlive an epoch"
    part = loader
    while part is not None:
        drawn = isinstance(getattr(part, "generator", None), torch.Generator)
        drawn &= not isinstance(part, SeedableRandomSampler)  # it seeds in each epoch
        if drawn or _is_foreign(part) or isinstance(loader.dataset, IterableDataset):
            return f"{type(part).__name__} has the order of samples"
        part = getattr(part, "batch_sampler", getattr(part, "sampler", None))
    return ""


def _expect_possible(trainer: Any) -> None:
    missing = [name for name in _HOOKS if not hasattr(Trainer, name)]
    if missing:
        raise UserError(
            f"holdfast.integrations.InMemoryTrainer: got transformers {transformers.__version__}, "
            f"whose Trainer has no {missing[0]}; expected one like 5.23; install that, or use "
            "TransformersCallback and the trainer's own checkpoints"
        )
    wrong = ""
    if trainer._session is not None:
        wrong = "a second call of train; expected one in a process; make a job of each training"
    elif trainer.args.auto_find_batch_size:
        wrong = "auto_find_batch_size=True; expected False; give per_device_train_batch_size"
    elif trainer.hp_search_backend is not None:
        wrong = "a hyperparameter search; expected one training; make a job of each trial"
    elif trainer.is_deepspeed_enabled:
        wrong = "DeepSpeed, which divides the optimizer by itself; expected DDP or FSDP2"
    if wrong:
        raise UserError(f"holdfast.integrations.InMemoryTrainer: got {wrong}")
