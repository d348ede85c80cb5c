"""DeepSpeed's ZeRO-1, which saves and loads its own checkpoints; nothing about Holdfast.

holdfast run examples/frameworks/deepspeed_zero.py --nodes 2 --workers 2
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

BATCH = 64
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/deepspeed_zero")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    path, state = engine.load_checkpoint(options.out)
    step = state["step"] if path else 0
    if dist.get_rank() == 0:
        print(f"starting at step {step} with {dist.get_world_size()} ranks", flush=True)

    while step < options.steps:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        bits = torch.randint(0, 2, (BATCH, 8), device=engine.device).float()
        logits = engine(bits).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, bits.sum(1) % 2)
        engine.backward(loss)
        engine.step()
        step += 1
        if step % options.save_every == 0:
            engine.save_checkpoint(options.out, client_state={"step": step})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
