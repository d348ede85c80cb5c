"""A loop with accelerate, which saves its state and loads the newest; nothing about Holdfast.

holdfast run examples/frameworks/accelerate_loop.py --nodes 2 --workers 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate_loop"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bits = torch.randint(0, 2, (8192, 8)).float()
    data = DataLoader(TensorDataset(bits, bits.sum(1) % 2), batch_size=64, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = 0
    if saved := sorted(options.out.glob("step-*")):
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
        accelerator.print(f"resumed from step {step}")

    while step < options.steps:
        for inputs, parity in data:
            logits = model(inputs).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, parity)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                accelerator.save_state(str(options.out / f"step-{step:06d}"))
                accelerator.print(f"step {step} loss {loss.item():.4f}")
            if step == options.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
