"""lightning.Trainer with DDP; ModelCheckpoint, and ckpt_path='last'."""

from __future__ import annotations

import os
from typing import Any

import lightning
import steplog
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepLog(Callback):
    """Callback that only writes the step log."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        steplog.finished(trainer.global_step, float(outputs["loss"]))


def main(
    *more: Callback, module: lightning.LightningModule | None = None, **settings: Any
) -> lightning.Trainer:
    """`settings` are added to those of the trainer, which is returned when it has trained."""
    options = steplog.parser(__doc__).parse_args()
    lightning.seed_everything(0)
    dataset = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    keep = ModelCheckpoint(
        dirpath=options.out, every_n_train_steps=options.save_every, save_last=True, save_top_k=1
    )
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=per_node,
        num_nodes=int(os.environ["WORLD_SIZE"]) // per_node,
        max_steps=options.steps,
        default_root_dir=options.out,
        callbacks=[StepLog(), keep, *more],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    data = DataLoader(dataset, batch_size=32, shuffle=True)
    trainer.fit(module or Classifier(), data, ckpt_path="last")
    return trainer


if __name__ == "__main__":
    main()
