"""Progress of Lightning's Trainer: each optimizer step, validations and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from holdfast.workers.session import reporting


class LightningCallback(Callback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[LightningCallback()])`. Every rank reports.

    The loss is what `training_step` returns. While the trainer validates or saves, a rank may make
    no progress for 600 s. On the notice of a planned stop the trainer saves a checkpoint, which
    `ckpt_path="last"` finds, and the process exits.
    """

    def __init__(self) -> None:
        self._step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step - 1
        reporting.begin(self._step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        reporting.enter("train")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        step = trainer.global_step - 1
        if step <= self._step:
            return  # accumulation: the optimizer has not stepped
        self._step = step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        total = trainer.estimated_stepping_batches
        reporting.report(
            step,
            loss=loss,
            total_steps=int(total) if 0 < total < float("inf") else 0,
        )
        notice = reporting.preemption()
        if notice is not None and step == notice.after_step:
            _save(trainer)
            raise SystemExit(0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        reporting.enter("evaluate")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        reporting.enter("train")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        # The file is written after this call; the next batch ends the phase.
        reporting.enter("save")


def _save(trainer: Any) -> None:
    """Writes the checkpoint that the newest of a ModelCheckpoint would be. Collective."""
    keeps = trainer.checkpoint_callback
    directory = getattr(keeps, "dirpath", None) or trainer.default_root_dir
    name = f"{getattr(keeps, 'CHECKPOINT_NAME_LAST', 'last')}.ckpt"
    with reporting.phase("save"):
        trainer.save_checkpoint(Path(directory) / name)
