"""A script for torchrun: plain DDP with its own checkpoint, and nothing about Holdfast.

holdfast run examples/script.yaml
torchrun --nproc-per-node 2 examples/ddp_script.py --steps 200
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/ddp_script.pt"))
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"] + 1
    if rank == 0:
        print(f"starting at step {start} with {dist.get_world_size()} ranks", flush=True)

    for step in range(start, options.steps):
        torch.manual_seed(step * dist.get_world_size() + rank)
        bits = torch.randint(0, 2, (64, 8), device=device).float()
        loss = nn.functional.binary_cross_entropy_with_logits(ddp(bits).squeeze(1), bits.sum(1) % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % options.every == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            partial = options.checkpoint.with_suffix(".partial")
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, partial)
            partial.replace(options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
