"""trl.SFTTrainer with LoRA on a small Llama from a config, on a text dataset in memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import steplog
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(200)]


class StepLog(TrainerCallback):
    """Only writes the step log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            steplog.finished(state.global_step, float(logs["loss"]))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    ))  # fmt: skip
    texts = [" ".join(WORDS[(i * 7 + j) % 200] for j in range(24)) for i in range(512)]
    arguments = SFTConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        max_length=32,
        save_strategy="steps",
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[StepLog()],
    )
    newest = get_last_checkpoint(str(options.out)) if options.out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main()
