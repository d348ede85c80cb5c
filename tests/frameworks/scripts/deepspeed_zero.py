"""DeepSpeed ZeRO on CPUs with torch's Adam; save_checkpoint, load_checkpoint by its `latest`."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import steplog
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    step = 0
    path, state = engine.load_checkpoint(str(options.out))
    if path is not None:
        step = state["step"]
    while step < options.steps:
        generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        inputs = torch.randn(BATCH, 64, generator=generator)
        targets = torch.randint(0, 10, (BATCH,), generator=generator)
        loss = F.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        step += 1
        steplog.finished(step, loss.item())
        if step % options.save_every == 0:
            engine.save_checkpoint(
                str(options.out), tag=f"step-{step:06d}", client_state={"step": step}
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
