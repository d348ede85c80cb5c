"""Lightning's Trainer with its state in the memory of the nodes: after a failure it resumes with
the next step, as a loop of one's own with the session does.

The trainer keeps its loops. Their progress, which Lightning writes into its own checkpoints, is
staged with the model and the optimizers; batches that were trained are skipped.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.loops.loop import _Loop

from holdfast.orchestrator.errors import UserError
from holdfast.workers import session
from holdfast.workers.session.order import mix

from .fixed_size import pack, to_json, unpack
from .lightning import LightningCallback, total_steps
from .resumed_lightning import same_samples, skip


class InMemoryLightning(LightningCallback):
    """`Trainer(..., callbacks=[InMemoryLightning()])`, in place of LightningCallback.

    Random generators are seeded in each step, from (seed, step, rank), so that random numbers
    continue after a restore. What the nodes' memory or storage has comes before `ckpt_path`, which
    a first launch uses. Raises UserError for what cannot be kept: manual optimization, and a second
    call of fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._joined: Any = None
        self._loss: Any = None
        self._ended = False
        self._generators: dict[int, torch.Generator] = {}
        """Generators by the id of the sampler that had none."""

    # -- before the loop ------------------------------------------------------------------------
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        wrong = ""
        if self._joined is not None:
            wrong = "a second call of fit; expected one in a process; make a job of each training"
        elif not pl_module.automatic_optimization:
            wrong = "manual optimization; expected automatic; or use session.restore"
        elif trainer.world_size > 1 and not dist.is_initialized():
            wrong = f"{type(trainer.strategy).__name__} without a process group; expected DDP"
        if wrong:
            raise UserError(f"holdfast.integrations.InMemoryLightning: got {wrong}")
        self._joined = session.init()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Runs after the strategy has wrapped the model and made the optimizers, before a
        checkpoint of Lightning's is read."""
        if self._joined.restoring:
            connector, read = trainer._checkpoint_connector, "_restore_modules_and_callbacks"
            connector._loaded_checkpoint = {}
            if trainer.strategy.restore_checkpoint_after_setup:  # it would be read after this
                setattr(connector, read, lambda *_: delattr(connector, read))
            self._restore(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._joined.restoring:
            self._restore(trainer)
        self._step = self._joined.next_step - 1
        loop = trainer.fit_loop
        self._set_order(loop)
        if self._joined.restoring or self._generators:
            trained = loop.epoch_loop.batch_progress.current.ready if self._kept.in_epoch else 0
            skip(loop._data_fetcher, trained, self._joined.tick)

    def _restore(self, trainer: Any) -> None:
        self._kept = kept = _KeptOfLightning(trainer)
        model, optimizers = trainer.strategy.model, trainer.optimizers
        self._joined.restore(model, optimizers, kept, start=trainer.global_step)

    def _set_order(self, loop: Any) -> None:
        """Makes the order of samples in this epoch a function of seed and epoch."""
        epoch = loop.epoch_progress.current.processed
        for loader in loop._combined_loader.flattened:
            for name in ("sampler", "batch_sampler"):
                sampler: Any = getattr(loader, name, None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                elif getattr(sampler, "generator", self) is None:
                    sampler.generator = self._generators[id(sampler)] = torch.Generator()
                if id(sampler) in self._generators:
                    self._generators[id(sampler)].manual_seed(mix(_seed_of_trainer(), epoch))

    # -- the loop -------------------------------------------------------------------------------
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._set_order(trainer.fit_loop)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        _seed(trainer.global_step, self._joined.data_parallel_rank)
        super().on_train_batch_start(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if trainer.global_step - 1 <= self._step:
            return  # accumulation: the optimizer has not stepped
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        loop = trainer.fit_loop.epoch_loop
        if loop.batch_progress.is_last_batch or loop._is_training_done or trainer.should_stop:
            return
        by_metric = any(c.reduce_on_plateau for c in trainer.lr_scheduler_configs)
        if loop._should_check_val_fx(trainer.fit_loop._data_fetcher) and not by_metric:
            loop.val_loop.run = partial(self._validate, trainer, loop.val_loop)
        else:
            self._finished(trainer)

    def _validate(self, trainer: Any, loop: Any) -> None:
        """A validation belongs to the step before it, with what it changes in callbacks."""
        del loop.run
        loop.run()
        self._finished(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step - 1 > self._step:
            self._finished(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._ended = True
        self._joined.finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._ended:  # restarted after the last step: the loop did not begin
            self._joined.finish()

    def _finished(self, trainer: Any) -> None:
        self._step = trainer.global_step - 1
        self._joined.step(self._step, loss=self._loss, total_steps=total_steps(trainer))


class _KeptOfLightning:
    """State of a checkpoint beside tensors: schedules, and the progress of loops and callbacks."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.in_epoch = False
        """The restored step was not the last one of its epoch."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # batches are skipped instead
        epoch = trainer.fit_loop.epoch_progress.current
        state = {
            "loops": loops,
            "epoch_ended": epoch.processed == epoch.started,
            "world": trainer.world_size,
            "callbacks": {c.state_key: kept for c in trainer.callbacks if (kept := c.state_dict())},
        }
        return {
            "trainer": pack(to_json(state)),
            "precision": trainer.precision_plugin.state_dict(),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        trainer, state = self.trainer, unpack(kept["trainer"])
        trainer.fit_loop.load_state_dict(state["loops"])
        same_samples(trainer, state.get("world", trainer.world_size))
        self.in_epoch = not state["epoch_ended"]
        if not self.in_epoch:  # the loops begin the next epoch
            # FitLoop's own setter keeps it with max_steps.
            _Loop.restarting.fset(trainer.fit_loop, False)
            progress = trainer.fit_loop.epoch_progress
            for count in (progress.total, progress.current):
                count.completed = count.processed
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if kept["precision"]:
            trainer.precision_plugin.load_state_dict(kept["precision"])
        for config, schedule in zip(trainer.lr_scheduler_configs, kept["schedules"], strict=True):
            config.scheduler.load_state_dict(schedule)


def _seed_of_trainer() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _seed(step: int, rank: int) -> None:
    base = _seed_of_trainer()
    seed_everything(mix(base, step, rank) % 2**32, verbose=False)
    os.environ["PL_GLOBAL_SEED"] = str(base)
