"""Trains with ZeRO and saves, or loads that in another number of ranks; writes all parameters and
the whole state of their optimizer into a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from holdfast.workers.agent.pool import framework_hooks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--stage", type=int, choices=[1, 2], required=True)
    options = parser.parse_args()
    framework_hooks.install()  # as a worker of Holdfast has it
    dist.init_process_group("gloo")
    torch.manual_seed(0 if options.what == "save" else 1)
    # Sizes that the ranks do not divide: parts of a tensor, and padding.
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if options.what == "save":
        for _ in range(3):
            train_one(engine)
        engine.save_checkpoint(str(options.out), tag="three", client_state={"steps": 3})
    else:
        path, kept = engine.load_checkpoint(str(options.out))
        assert Path(path).parent == options.out / "three" and kept["steps"] == 3
        assert engine.global_steps == 3
    state = {name: whole(parameter) for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(state, options.state)
    train_one(engine)
    engine.save_checkpoint(str(options.out), tag=f"after-{options.what}")
    dist.destroy_process_group()


def train_one(engine: deepspeed.DeepSpeedEngine) -> None:
    loss = engine(torch.randn(4, 7)).square().mean()
    engine.backward(loss)
    engine.step()


def whole(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    moments = {key: safe_get_full_optimizer_state(parameter, key) for key in
               ("exp_avg", "exp_avg_sq")}  # fmt: skip
    return {"fp32": safe_get_full_fp32_param(parameter), "used": parameter.detach(), **moments}


if __name__ == "__main__":
    main()
