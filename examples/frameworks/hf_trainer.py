"""transformers' Trainer with a small Llama that learns to count; nothing about Holdfast.

holdfast run examples/frameworks/hf_trainer.py --nodes 2 --workers 2

A restart continues from the newest checkpoint. Arguments of the trainer are options, after `--`.
"""

from __future__ import annotations

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="runs/hf_trainer", max_steps=100, save_steps=20, save_total_limit=3,
        per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=10, report_to="none",
    )  # fmt: skip
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    ))  # fmt: skip
    texts = (torch.randint(0, 256, (2048, 1)) + torch.arange(64)) % 256
    data = [{"input_ids": text, "labels": text} for text in texts]
    Trainer(model, arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
