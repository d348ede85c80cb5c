"""hf_memory.py with all that a process that is kept has to set right: accumulation, the ends of
epochs, evaluations, early stopping, and counted tokens. Each rank writes what came of it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from hf_trainer import main
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback

from holdfast.integrations import in_memory

TIMES = ("runtime", "per_second", "total_flos", "train_loss", "train_tokens")


class Result(TrainerCallback):
    """Callback that writes the trainer's numbers and a digest of the model; with COUNTS, one that
    counts by itself."""

    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ.get("COUNTS"):
            self.count += 1

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        digest = hashlib.blake2b()
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
        logs = [
            {key: value for key, value in log.items() if not any(word in key for word in TIMES)}
            for log in state.log_history
        ]
        result = {
            "digest": digest.hexdigest(), "tokens": state.num_input_tokens_seen,
            "flos": state.total_flos, "step": state.global_step, "epoch": state.epoch, "logs": logs,
        }  # fmt: skip
        Path(args.output_dir, f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))


def main_kept(**more: Any) -> None:
    main(
        Result(),
        EarlyStoppingCallback(early_stopping_patience=100),
        prepare=in_memory,
        gradient_accumulation_steps=8,
        eval_strategy="steps",
        eval_steps=6,
        eval_on_start=bool(os.environ.get("EVALUATES_FIRST")),
        metric_for_best_model="eval_loss",
        include_num_input_tokens_seen="all",
        **more,
    )


if __name__ == "__main__":
    main_kept(ddp_find_unused_parameters=True)  # its buckets stay, so that sums have one order
