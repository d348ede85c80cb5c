"""TRL's SFTTrainer with LoRA on a small Llama, words as tokens; nothing about Holdfast.

holdfast run examples/frameworks/trl_lora.py --nodes 2 --workers 2

A restart continues from the newest checkpoint. Arguments of the trainer are options, after `--`.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

WORDS = [f"w{number}" for number in range(200)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *WORDS]
    vocabulary = {word: index for index, word in enumerate(words)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = HfArgumentParser(SFTConfig)
    parser.set_defaults(
        output_dir="runs/trl_lora", max_steps=100, save_steps=20, save_total_limit=3, max_length=32,
        per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=10, report_to="none",
        bf16=torch.cuda.is_available(), gradient_checkpointing=False,
    )  # fmt: skip
    (arguments,) = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    ))  # fmt: skip
    texts = [" ".join(WORDS[(i * 7 + j) % 200] for j in range(24)) for i in range(512)]
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    SFTTrainer(
        model, arguments, train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=word_tokenizer(), peft_config=lora,
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
