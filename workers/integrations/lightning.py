"""Progress of Lightning's Trainer: each optimizer step, validations and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from holdfast.workers.session import reporting


class LightningCallback(Callback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[LightningCallback()])`. Every rank reports.

    The loss is what `training_step` returns. While the trainer validates or saves, and after its
    last step, a rank may make no progress for 600 s; each batch of a validation, a test or a
    prediction is progress. With manual optimization a step is a batch. On the notice of a planned
    stop the trainer saves a checkpoint, which `ckpt_path="last"` finds, and the process exits.
    """

    def __init__(self) -> None:
        self._step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = _last_step(trainer)
        reporting.begin(self._step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        reporting.enter("train")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        step = _last_step(trainer)
        if step <= self._step:
            return  # accumulation: the optimizer has not stepped
        self._step = step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        reporting.report(step, loss=loss, total_steps=total_steps(trainer))
        notice = reporting.preemption()
        if notice is not None and step == notice.after_step:
            _save(trainer)
            raise SystemExit(0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        reporting.enter("evaluate")

    def on_validation_batch_start(self, *_: Any) -> None:
        reporting.progress("evaluate")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        # The file is written after this call; the next batch, or the end, ends the phase.
        reporting.enter("save")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        reporting.enter("finish")

    on_fit_end = on_train_end  # other callbacks may have saved when the training ended


def _last_step(trainer: Any) -> int:
    """The last finished step. With manual optimization Trainer.global_step counts the steps of all
    optimizers, several in a batch."""
    if trainer.lightning_module.automatic_optimization:
        return int(trainer.global_step) - 1
    return int(trainer.fit_loop.epoch_loop.total_batch_idx)


def total_steps(trainer: Any) -> int:
    """0: not known, as with manual optimization and max_steps, which counts as global_step does."""
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps >= 0:
        return 0
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < float("inf") else 0


def _save(trainer: Any) -> None:
    """Writes the checkpoint that the newest of a ModelCheckpoint would be. Collective."""
    keeps = trainer.checkpoint_callback
    directory = getattr(keeps, "dirpath", None) or trainer.default_root_dir
    name = f"{getattr(keeps, 'CHECKPOINT_NAME_LAST', 'last')}.ckpt"
    with reporting.phase("save"):
        trainer.save_checkpoint(Path(directory) / name)
