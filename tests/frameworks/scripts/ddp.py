"""DistributedDataParallel as in torchrun's tutorial: rank 0 writes one snapshot, all read it."""

from __future__ import annotations

from pathlib import Path

import steplog
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model: nn.Module, snapshot: Path, save_every: int) -> None:
        self.step = 0
        self.snapshot, self.save_every = snapshot, save_every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if snapshot.exists():
            state = torch.load(snapshot, map_location="cpu")
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            print(f"resumed from step {self.step}", flush=True)
        self.model = DistributedDataParallel(model)

    def train(self, data: DataLoader, sampler: DistributedSampler, steps: int) -> None:
        epoch = 0
        while self.step < steps:
            sampler.set_epoch(epoch)
            for inputs, targets in data:
                self.batch(inputs, targets)
                if self.step == steps:
                    break
            epoch += 1

    def batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        steplog.finished(self.step, loss.item())
        if self.step % self.save_every == 0 and dist.get_rank() == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
            }
            torch.save(state, self.snapshot)


def main() -> None:
    options = steplog.parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                          nn.Linear(512, 10))  # fmt: skip
    dataset = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    sampler = DistributedSampler(dataset)
    data = DataLoader(dataset, batch_size=32, sampler=sampler)
    trainer = Trainer(model, options.out / "snapshot.pt", options.save_every)
    trainer.train(data, sampler, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
