"""A loop of one's own with accelerate: save_state into numbered directories, and load_state from
the newest. DDP: on CPUs accelerate 1.15 ignores a plugin for FSDP2, without a word."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import steplog
import torch
import torch.nn.functional as F  # noqa: N812
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """Saved and loaded with the rest."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(options.out), automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    data: Any = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    checkpoints = options.out / "checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        accelerator.load_state()
        # Names go on after those that exist.
        numbers = [int(path.name.rpartition("_")[2]) for path in checkpoints.iterdir()]
        accelerator.project_configuration.iteration = max(numbers) + 1
    while progress.step < options.steps:
        for inputs, targets in data:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            steplog.finished(progress.step, loss.item())
            if progress.step % options.save_every == 0:
                accelerator.save_state()
            if progress.step == options.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
