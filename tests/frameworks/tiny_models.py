"""Tiny random models of transformers with a tokenizer, and lines to train them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rope_theta": 500000.0},
    "qwen2": {},  # with biases
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 24},
}
"""model_type -> what is special in it."""
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 256,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(directory: Path, kind: str, **sizes: int) -> Path:
    """A directory as save_pretrained writes it, in two files with an index."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **sizes})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, max_shard_size="150KB")
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> Any:
    """Every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def make_lines(path: Path, count: int) -> Path:
    """Lines of each kind, of many lengths."""
    lines: list[dict[str, Any]] = []
    for n in range(count):
        question, answer = f"{n} + {n} =" + "?" * (n % 5), f" {2 * n}" + "!" * (n % 7)
        said = [
            {"role": "user", "content": question}, {"role": "assistant", "content": answer},
            {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"},
        ]  # fmt: skip
        lines.append([
            {"prompt": question, "completion": answer}, {"messages": said},
            {"text": question + answer},
        ][n % 3])  # fmt: skip
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path
