"""torchtitan configurations: axes, batch, model of the catalogue, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.preflight.importers import Imported, import_config

LLAMA = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
max_norm = 1.0
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
"""


def imported(tmp_path: Path, text: str, **options: Any) -> Imported:
    path = tmp_path / "train.toml"
    path.write_text(text)
    made = import_config(path, **options)
    parse_job(made.text)
    return made


def test_a_published_model_keeps_its_sizes(tmp_path: Path) -> None:
    made = imported(tmp_path, LLAMA, nodes=1, workers=8)
    config = made.document["spec"]["entrypoint"]["recipe"]["config"]
    assert config["model"] == {
        "vocabSize": 128256, "dim": 4096, "numLayers": 32, "numHeads": 32, "numKvHeads": 8,
        "ffnDim": 14336,
    }  # fmt: skip
    assert (config["microBatch"], config["globalBatch"], config["steps"]) == (2, 16, 1000)
    assert config["optimizer"] == {"gradientClip": 1.0, "learningRate": 3e-4, "warmupSteps": 200}
    assert made.document["spec"]["parallelism"] == {"shard": "world"}
    assert made.dropped == []


def test_axes_give_the_number_of_workers(tmp_path: Path) -> None:
    axes = """
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 1
"""
    spec = imported(tmp_path, LLAMA.replace("size = 2", "size = 8") + axes).document["spec"]
    assert (spec["nodes"]["max"], spec["workersPerNode"]) == (8, 8)
    assert spec["parallelism"] == {
        "shard": 4, "tensor": 4, "pipeline": {"ranks": 2, "schedule": "interleaved1f1b"},
    }  # fmt: skip
    assert spec["entrypoint"]["recipe"]["config"]["microBatch"] == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('mode = "full"', {"full": {}}),
        ('mode = "selective"\nselective_ac_option = "op"', {"selective": {}}),
        ('mode = "selective"\nselective_ac_option = "2"', {"full": {"everyNthBlock": 2}}),
        ('mode = "memory_budget"\nmemory_budget = 0.3', {"budget": 0.3}),
    ],
)
def test_activation_checkpointing_is_kept(text: str, found: dict[str, Any], tmp_path: Path) -> None:
    made = imported(tmp_path, f"{LLAMA}\n[activation_checkpoint]\n{text}\n", nodes=1, workers=8)
    assert made.document["spec"]["parallelism"]["activationCheckpointing"] == found


def test_schedule_checkpoints_and_what_is_dropped(tmp_path: Path) -> None:
    text = (
        LLAMA
        + """
decay_ratio = 0.1
decay_type = "sqrt"
min_lr_factor = 0.0
[parallelism]
fsdp_reshard_after_forward = "never"
expert_parallel_degree = 2
[checkpoint]
enable = true
interval = 500
keep_latest_k = 3
async_mode = "async"
[metrics]
log_freq = 10
"""
    )
    made = imported(tmp_path, text, nodes=1, workers=8)
    spec = made.document["spec"]
    optimizer = spec["entrypoint"]["recipe"]["config"]["optimizer"]
    assert optimizer["learningRateSchedule"] == {"wsd": {"decaySteps": 100, "minRatio": 0.0}}
    assert spec["checkpoint"] == {"storage": {"everySteps": 500}, "retention": {"keepLast": 3}}
    assert spec["parallelism"]["fsdp"]["reshardAfterForward"] is False
    dropped = {drop.field for drop in made.dropped}
    assert dropped == {
        "parallelism.expert_parallel_degree", "lr_scheduler.decay_type", "checkpoint.async_mode",
        "metrics.log_freq",
    }  # fmt: skip


WRONG = {
    "no number of workers": ("", {}, "number of workers: got nothing; expected it; pass --nodes"),
    "a contradiction": (
        "[parallelism]\ndata_parallel_shard_degree = 4\n",
        {"nodes": 1, "workers": 8},
        "got 4 in the configuration, 8 by nodes x workers (1 x 8); expected the same number",
    ),
    "a batch that does not divide": (
        "[training]\nglobal_batch_size = 33\n",
        {"nodes": 1, "workers": 8},
        "training.global_batch_size: got 33; expected a multiple of 16",
    ),
    "an axis of 0": (
        "[parallelism]\ndata_parallel_shard_degree = 0\n",
        {"nodes": 1, "workers": 8},
        "data_parallel_shard_degree: got 0; expected at least 1, or -1",
    ),
    "an unknown schedule": (
        '[parallelism]\npipeline_parallel_schedule = "Magic"\n',
        {"nodes": 1, "workers": 8},
        "pipeline_parallel_schedule: got Magic; expected one of GPipe",
    ),
    "a tensor axis over nodes": (
        "[parallelism]\ntensor_parallel_degree = 8\n",
        {"nodes": 4, "workers": 2},
        "parallelism.tensor: got 8; expected a divisor of workersPerNode (2)",
    ),
}


@pytest.mark.parametrize(("text", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_configuration_is_refused_with_its_field(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    in_place = text.startswith("[training]")
    whole = LLAMA.replace("[training]\n", text) if in_place else LLAMA + text
    with pytest.raises(UserError) as refused:
        imported(tmp_path, whole, **options)
    assert message in str(refused.value)
