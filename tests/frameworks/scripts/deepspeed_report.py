"""deepspeed_zero.py with one line more, which reports its steps. Beside it a second engine trains,
as the critic of a GAN does, and at times the script evaluates for longer than a hang may last.

EVALUATION_SECONDS: of one batch of an evaluation, after step 10 and after the last one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed_zero import CONFIG, main
from torch import nn

from holdfast.integrations import report_deepspeed

EVALUATION_S = float(os.environ.get("EVALUATION_SECONDS", "0"))


def prepare(engine: Any, steps: int, save: Callable[[int], None]) -> Callable[[int], None]:
    report_deepspeed(engine, total_steps=steps, save=save)
    model = nn.Linear(64, 1)
    critic, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    report_deepspeed(critic)

    def train_and_evaluate(step: int) -> None:
        critic.backward(critic(torch.randn(4, 64)).square().mean())
        critic.step()
        if EVALUATION_S and step in (10, steps):
            with torch.no_grad():
                engine(torch.randn(4, 64))
                time.sleep(EVALUATION_S)

    return train_and_evaluate


if __name__ == "__main__":
    main(prepare)
