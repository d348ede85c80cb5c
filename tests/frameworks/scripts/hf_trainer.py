"""transformers.Trainer with a small Llama from a config; resumes from the newest checkpoint-N."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import steplog
import torch
from torch.utils.data import Dataset, Subset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 256, (2048, 64))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class StepLog(TrainerCallback):
    """Callback that only writes the step log."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steplog.pace()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            steplog.write(state.global_step, float(logs["loss"]))


def main(
    *more: TrainerCallback,
    prepare: Callable[[Trainer], Trainer] = lambda t: t,
    begin: Callable[[], None] = lambda: None,
    **settings: Any,
) -> None:
    """`begin` is called between the arguments, which `settings` are added to, and the trainer."""
    options = steplog.parser(__doc__).parse_args()
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    ))  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        **settings,
    )
    begin()
    data = Tokens()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=Subset(data, range(64)),
        callbacks=[StepLog(), *more],
    )
    trainer = prepare(trainer)
    newest = get_last_checkpoint(str(options.out)) if options.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
