"""torchtitan's Trainer with its smallest Llama 3, FSDP2 over all ranks, and its checkpoints.

torchtitan 0.3 is written for accelerators. `_on_cpus` and `_for_gloo` are what it lacks to run on
CPUs, and attention is torch's own, as FlexAttention has no backward there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import steplog
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer


def _on_cpus() -> None:
    """The device of torchtitan is an accelerator, or CUDA: its modules have it as a global variable
    each. torch.cpu has no statistics of memory."""
    if utils.device_module.is_available():
        return
    none = {"memory_stats": dict, "get_device_name": str, "empty_cache": None}
    answers = {
        name: (lambda *_, kind=kind: kind() if kind else None) for name, kind in none.items()
    }
    device = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"},
        **answers,
        reset_peak_memory_stats=lambda *_: None,
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1),
    )
    device.current_device = lambda: 0
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            for variable, value in (("device_type", "cpu"), ("device_module", device)):
                if variable in vars(module):
                    setattr(module, variable, value)


class LoggedMetrics(MetricsProcessor):
    """Metrics that only write the step log."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *args: Any, **more: Any) -> None:
        super().log(step, global_avg_loss, *args, **more)
        steplog.finished(step, global_avg_loss)


def main(*overrides: str) -> None:
    options = steplog.parser(__doc__).parse_args()
    _on_cpus()
    init_logger()
    trainer = _config(options, list(overrides)).build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


def _for_gloo(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    """gloo has no reduction that multiplies, with which FSDP2 divides gradients."""

    def parallelize_for_gloo(*args: Any, **more: Any) -> Any:
        model = parallelize(*args, **more)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize_for_gloo


def _config(options: argparse.Namespace, overrides: list[str]) -> Trainer.Config:
    config = llama3_debugmodel()
    config.model_spec = dataclasses.replace(
        config.model_spec, parallelize_fn=_for_gloo(config.model_spec.parallelize_fn)
    )
    model = config.model_spec.model
    for _name, _config, parent, field in list(model.traverse(FlexAttention.Config)):
        setattr(parent, field, ScaledDotProductAttention.Config())
    del model.layers[2:]
    config.hf_assets_path = str(_assets(options.out.parent / "assets"))
    config.dump_folder = str(options.out)
    config.dataloader = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=f"{config.hf_assets_path}/data", infinite=True
    )
    config.validator.enable, config.validator.freq, config.validator.steps = True, 10, 1
    config.validator.dataloader = config.dataloader
    config.optimizer.implementation = "for-loop"
    config.metrics = LoggedMetrics.Config(log_freq=1, disable_color_printing=True)
    config.training.steps = options.steps
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.disable_cuda_graphs = True
    config.debug.seed = 0
    config.checkpoint.enable = True
    config.checkpoint.interval = options.save_every
    config.checkpoint.keep_latest_k = 3
    config.comm.trace_buf_size = 0
    config.override.imports = overrides
    return config


def _assets(folder: Path) -> Path:
    """A tokenizer of bytes and a text to train on: torchtitan's own are not in its package. Each
    rank makes them, and one of them names them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if folder.exists():
        return folder
    mine = folder.with_name(f"{folder.name}-{os.getpid()}")
    (mine / "data").mkdir(parents=True)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(mine / "tokenizer.json"))
    (mine / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    texts = Path(torch.__file__).read_text(encoding="utf-8").split("\n\n")
    lines = [json.dumps({"text": text}) for text in texts]
    (mine / "data" / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with contextlib.suppress(OSError):  # another rank was first
        mine.rename(folder)
    return folder


if __name__ == "__main__":
    main()
