"""ms-swift: supervised fine-tuning with LoRA of a small Qwen2, whose files this script writes.

`swift sft` starts a module that calls the same function with the words of its line.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_HF", "1")

import steplog
from swift import sft_main
from swift.callbacks import TrainerCallback, callbacks_map
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "user", "assistant", "system"]
WORDS = [f"w{number}" for number in range(200)]


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Callback that only writes the step log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            steplog.finished(state.global_step, float(logs["loss"]))


callbacks_map["steplog"] = StepLog


def write_files(to: Path) -> None:
    """Model, tokenizer and data. Each rank may write them; those of the first one are taken."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix="making-") as place:
        new = Path(place) / "files"
        vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
        plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=plain, unk_token="<unk>", pad_token=SPECIAL[0], eos_token=SPECIAL[2]
        ).save_pretrained(new)
        set_seed(0)
        Qwen2ForCausalLM(Qwen2Config(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            pad_token_id=0, bos_token_id=0, eos_token_id=2,
        )).save_pretrained(new)  # fmt: skip
        with (new / "data.jsonl").open("w") as lines:
            for i in range(512):
                text = [" ".join(WORDS[(i * 7 + j + k) % 200] for j in range(8)) for k in (0, 8)]
                turns = zip(("user", "assistant"), text, strict=True)
                messages = [{"role": role, "content": content} for role, content in turns]
                lines.write(json.dumps({"messages": messages}) + "\n")
        try:
            new.rename(to)
        except OSError:
            if not (to / "data.jsonl").exists():
                raise


def main() -> None:
    options = steplog.parser(__doc__).parse_args()
    files = options.out.parent / "swift-files"
    if not files.exists():
        write_files(files)
    sft_main([
        "--model", str(files), "--model_type", "qwen2", "--template", "qwen2_5",
        "--dataset", str(files / "data.jsonl"), "--output_dir", str(options.out),
        "--add_version", "false", "--torch_dtype", "float32", "--tuner_type", "lora",
        "--max_steps", str(options.steps), "--save_steps", str(options.save_every),
        "--save_total_limit", "2", "--logging_steps", "1", "--callbacks", "steplog",
        "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1",
        "--dataloader_num_workers", "0", "--dataset_num_proc", "1", "--max_length", "64",
        "--check_model", "false", "--load_from_cache_file", "false", "--split_dataset_ratio", "0",
        "--report_to", "none",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
