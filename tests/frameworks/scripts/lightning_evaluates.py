"""lightning_callback.py with validations and a test, whose first batches are slow."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from lightning_ddp import Classifier, main
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations import LightningCallback


class Evaluated(Classifier):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,))), 8)

    test_dataloader = val_dataloader

    def validation_step(self, batch: Any, index: int) -> None:
        if index == 0:
            time.sleep(float(os.environ["EVALUATION_SECONDS"]))
        self.training_step(batch, index)

    test_step = validation_step


if __name__ == "__main__":
    module = Evaluated()
    trainer = main(
        LightningCallback(), module=module, val_check_interval=10, num_sanity_val_steps=0
    )
    trainer.test(module)
