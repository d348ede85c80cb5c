"""lightning.Trainer with DDP and a ModelCheckpoint; nothing about Holdfast.

holdfast run examples/frameworks/lightning_fit.py --nodes 2 --workers 2

A restart continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Parity(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        bits, parity = batch
        logits = self.layers(bits).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, parity)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/lightning_fit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    lightning.seed_everything(0)
    bits = torch.randint(0, 2, (8192, 8)).float()
    data = DataLoader(TensorDataset(bits, bits.sum(1) % 2), batch_size=64, shuffle=True)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        strategy="ddp", devices=per_node,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // per_node,
        max_steps=options.steps, logger=False, enable_progress_bar=False,
        callbacks=[ModelCheckpoint(options.out, every_n_train_steps=options.save_every)],
    )  # fmt: skip
    trainer.fit(Parity(), data)


if __name__ == "__main__":
    main()
