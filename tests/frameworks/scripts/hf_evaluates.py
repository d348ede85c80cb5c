"""hf_callback.py, or with IN_MEMORY hf_memory.py, with evaluations of two data sets, and a
prediction after the training. The first batch of each takes EVALUATION_SECONDS."""

from __future__ import annotations

import os
import time

import torch
from hf_trainer import Tokens, main
from transformers import IntervalStrategy, Trainer

from holdfast.integrations import TransformersCallback, in_memory


class Slow(Tokens):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < 4:
            time.sleep(float(os.environ["EVALUATION_SECONDS"]) / 4)
        return super().__getitem__(index)


if __name__ == "__main__":
    trainers: list[Trainer] = []

    def prepare(trainer: Trainer) -> Trainer:
        trainers.append(trainer)
        trainer.eval_dataset = {"slow": Slow(), "slow-too": Slow()}
        trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 10
        return in_memory(trainer) if "IN_MEMORY" in os.environ else trainer

    callbacks = [] if "IN_MEMORY" in os.environ else [TransformersCallback()]
    main(*callbacks, prepare=prepare)
    trainers[0].predict(Slow())
