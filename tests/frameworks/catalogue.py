"""The scripts of `scripts/`, what each needs, and the job that runs one.

A script has no line about Holdfast. Its name is the name of its row in tests and tables.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples/frameworks"
LOG = "steps.jsonl"


@dataclass(frozen=True)
class Framework:
    name: str
    title: str
    script: str
    package: str
    """Package that must be installed; its version is shown beside the title."""
    args: tuple[str, ...] = ()
    example: str = ""
    """Program that `logged.py` runs."""
    options: tuple[str, str, str] = ("--out", "--steps", "--save-every")
    checkpoints: str = "."
    """Folder below `--out` in which a save begins with a new or changed entry."""
    preload: tuple[str, ...] = ()
    """Modules for spec.preload, which take long to import."""
    memory: str = ""
    """The same script with the integration that keeps its state in memory."""
    shard: int | str = 1
    """Case's spec.parallelism.shard."""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def words(self, out: Path, steps: int, save_every: int) -> list[str]:
        """Arguments of the script."""
        example = [str(EXAMPLES / self.example)] if self.example else []
        values = zip(self.options, (out, steps, save_every), strict=True)
        return [*example, *(str(word) for pair in values for word in pair), *self.args]


HUGGING_FACE = ("transformers", "accelerate")
FRAMEWORKS = [
    Framework("ddp", "DDP tutorial", "ddp.py", "torch"),
    Framework("fsdp2", "FSDP2 and DCP", "fsdp2_dcp.py", "torch"),
    Framework("muon", "Muon, DDP", "muon.py", "torch"),
    Framework("hf", "HF Trainer", "hf_trainer.py", "transformers", preload=HUGGING_FACE,
              memory="hf_memory.py"),
    Framework("trl", "TRL SFT, LoRA", "logged.py", "trl", example="trl_lora.py",
              options=("--output_dir", "--max_steps", "--save_steps"),
              preload=(*HUGGING_FACE, "trl", "peft")),
    Framework("accelerate", "accelerate, DDP", "logged.py", "accelerate",
              example="accelerate_loop.py", preload=("accelerate",)),
    Framework("lightning", "Lightning, DDP", "lightning_ddp.py", "lightning",
              preload=("lightning",), memory="lightning_memory.py"),
    Framework(
        "zero1", "DeepSpeed ZeRO-1", "deepspeed_zero.py", "deepspeed", ("--stage", "1"),
        preload=("deepspeed",),
    ),
    Framework(
        "zero2", "DeepSpeed ZeRO-2", "deepspeed_zero.py", "deepspeed", ("--stage", "2"),
        preload=("deepspeed",),
    ),
]  # fmt: skip
TORCHTITAN = Framework(
    "torchtitan", "torchtitan, FSDP2", "titan_llama3.py", "torchtitan", checkpoints="checkpoint",
    memory="titan_memory.py", shard="world",
)  # fmt: skip
"""Case with an environment of its own: TorchTitan needs a datasets before 4.8. Its data loader
needs the number of ranks that wrote a checkpoint."""


SWIFT = Framework(
    "swift", "ms-swift SFT, LoRA", "swift_sft.py", "swift", preload=(*HUGGING_FACE, "trl", "swift")
)
"""Case with its own environment: ms-swift needs older transformers, trl and datasets."""
APART = (TORCHTITAN, SWIFT)
"""Each in an environment of its own."""
EVERY = (*FRAMEWORKS, *APART)


def by_name(name: str) -> Framework:
    return next(one for one in EVERY if one.name == name)


def environment(place: Path, pace_s: float) -> dict[str, str]:
    """Variables of both a worker of Holdfast and one of torchrun."""
    return {
        "STEP_LOG": str(place / LOG),
        "STEP_SECONDS": str(pace_s),
        "HF_HOME": str(place / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
    }


def document(
    framework: Framework,
    place: Path,
    *,
    steps: int,
    save_every: int = 5,
    pace_s: float = 0.05,
    preload: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """A job of this script: 2 nodes x 2 workers, checkpoints of the script in `place`/out.

    `changes` are fields of the spec, in place of these.
    """
    spec: dict[str, Any] = {
        "entrypoint": {
            "script": framework.script,
            "args": framework.words(place / "out", steps, save_every),
        },
        "workingDirectory": str(SCRIPTS),
        "nodes": {"min": 1, "max": 2},
        "workersPerNode": 2,
        "resources": {"cpu": 1, "gpu": 0},
        "checkpoint": {"memory": {"everySteps": 0}},
        "env": environment(place, pace_s),
    }
    if preload and framework.preload:
        spec["preload"] = list(framework.preload)
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": framework.name},
        "spec": {**spec, **changes},
    }
