"""DeepSpeed ZeRO on CPUs with torch's Adam; save_checkpoint, load_checkpoint by its `latest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import steplog
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

BATCH = 32
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}

Save = Callable[[int], None]
"""Saves after this step, counted from 0."""
AfterStep = Callable[[int], None]
"""The same, counted from 1."""


def main(prepare: Callable[[Any, int, Save], AfterStep] = lambda *_: lambda _step: None) -> None:
    """`prepare` gets the engine, the number of steps, and how to save."""
    parser = steplog.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config=CONFIG | {"zero_optimization": {"stage": options.stage}},
    )  # fmt: skip

    def save(step: int) -> None:
        done = step + 1
        engine.save_checkpoint(
            str(options.out), tag=f"step-{done:06d}", client_state={"step": done}
        )

    step = 0
    path, state = engine.load_checkpoint(str(options.out))
    if path is not None:
        step = state["step"]
    after_step = prepare(engine, options.steps, save)
    while step < options.steps:
        generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        inputs = torch.randn(BATCH, 64, generator=generator)
        targets = torch.randint(0, 10, (BATCH,), generator=generator)
        loss = F.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        steplog.pace()
        engine.step()
        step += 1
        steplog.write(step, loss.item())
        if step % options.save_every == 0:
            save(step - 1)
        after_step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
