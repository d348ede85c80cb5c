"""`trainer.fit(model)` over numbered samples. The model adds up what it has trained on, so its last
checkpoint has the number of times that each sample counted in each epoch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import steplog
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

SAMPLES, BATCH, EPOCHS = 96, 4, 3


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class OwnState:
    """A loader that keeps its place."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Any:
        self.next %= len(self)
        for start in range(self.next * BATCH, SAMPLES, BATCH):
            self.next += 1
            yield torch.arange(start, start + BATCH)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Counts(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(EPOCHS, SAMPLES))
        self.register_buffer("orders", torch.full((EPOCHS, SAMPLES // BATCH), -1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch = batch["a"] if isinstance(batch, dict) else batch
        everywhere = self.all_gather(batch).flatten()
        self.seen[self.current_epoch, everywhere] += 1
        self.orders[self.current_epoch, index] = everywhere[0]
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StepLog(Callback):
    """Callback that only writes the step log."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        steplog.finished(trainer.global_step)


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(), BATCH, shuffle=True),
    "processes": lambda: DataLoader(
        Numbers(), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "generator": lambda: DataLoader(
        Numbers(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "subset": lambda: DataLoader(Numbers(), BATCH, sampler=SubsetRandomSampler(range(SAMPLES))),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "two": lambda: {"a": DataLoader(Numbers(), BATCH, shuffle=True), "b": DataLoader(Numbers(), 8)},
    "own-state": OwnState,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--loader", choices=LOADERS, required=True)
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    keep = ModelCheckpoint(
        dirpath=options.out, every_n_train_steps=options.save_every, save_last=True
    )
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    world = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=options.strategy,
        devices=per_node,
        num_nodes=world // per_node,
        max_epochs=EPOCHS,
        default_root_dir=options.out,
        callbacks=[StepLog(), keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Counts()
    trainer.fit(model, LOADERS[options.loader]())
    if trainer.is_global_zero:
        torch.save({"seen": model.seen, "orders": model.orders}, options.out / "counts.pt")


if __name__ == "__main__":
    main()
