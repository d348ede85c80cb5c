"""DeepSpeed configurations: ZeRO stages, batch sizes, offload, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.preflight.importers import Imported, import_config

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}


def imported(tmp_path: Path, config: dict[str, Any], **options: Any) -> Imported:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    made = import_config(path, **{"nodes": 2, "workers": 4, **options})
    parse_job(made.text)
    return made


def axes(tmp_path: Path, stage: int, **zero: Any) -> dict[str, Any]:
    made = imported(tmp_path, {**BATCH, "zero_optimization": {"stage": stage, **zero}})
    found = made.document["spec"]["parallelism"]
    assert isinstance(found, dict)
    return found


def test_each_stage_of_zero_is_a_strategy(tmp_path: Path) -> None:
    assert axes(tmp_path, 0) == {"shard": 1}
    assert axes(tmp_path, 1) == {
        "shard": "world",
        "fsdp": {"reshardAfterForward": False, "accumulateGradients": "whole"},
    }
    assert axes(tmp_path, 2) == {"shard": "world", "fsdp": {"reshardAfterForward": False}}
    assert axes(tmp_path, 3) == {"shard": "world"}


def test_groups_of_zero_plus_plus_and_mics_keep_their_sizes(tmp_path: Path) -> None:
    found = axes(tmp_path, 3, zero_hpz_partition_size=4)
    assert found == {"shard": 8, "fsdp": {"reshardAfterForward": 4}}
    assert axes(tmp_path, 3, mics_shard_size=4) == {"shard": 4}


def test_offload_to_main_memory_is_kept_and_nvme_is_refused(tmp_path: Path) -> None:
    assert axes(tmp_path, 3, offload_param={"device": "cpu"})["offload"] == "cpu"
    with pytest.raises(UserError, match=r"offload_param.device: got nvme; expected cpu or none"):
        axes(tmp_path, 3, offload_param={"device": "nvme"})


def test_the_number_of_workers_follows_from_three_batch_sizes(tmp_path: Path) -> None:
    made = imported(tmp_path, {**BATCH, "train_batch_size": 128}, nodes=None, workers=None)
    spec = made.document["spec"]
    assert (spec["nodes"], spec["workersPerNode"]) == ({"min": 2, "max": 2}, 8)
    assert spec["entrypoint"]["recipe"]["config"]["globalBatch"] == 128
    assert any("assumed: 2 nodes x 8 workers" in drop.value for drop in made.dropped)


@pytest.mark.parametrize(
    ("config", "micro", "total"),
    [({**BATCH}, 2, 64), ({"train_batch_size": 64}, 8, 64),
     ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 4, 64),
     ({"train_micro_batch_size_per_gpu": 3}, 3, 24)],
)  # fmt: skip
def test_the_missing_batch_size_is_computed(
    config: dict[str, Any], micro: int, total: int, tmp_path: Path
) -> None:
    made = imported(tmp_path, config).document["spec"]["entrypoint"]["recipe"]["config"]
    assert (made["microBatch"], made["globalBatch"]) == (micro, total)


def test_optimizer_schedule_and_formats_are_kept(tmp_path: Path) -> None:
    made = imported(tmp_path, {
        **BATCH, "bf16": {"enabled": True}, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": "3e-4", "betas": [0.9, 0.98], "eps": 1e-8}},
        "scheduler": {"type": "WarmupCosineLR",
                      "params": {"warmup_num_steps": 10, "total_num_steps": 900,
                                 "cos_min_ratio": 0.2}},
        "communication_data_type": "bf16",
    })  # fmt: skip
    config = made.document["spec"]["entrypoint"]["recipe"]["config"]
    assert config["steps"] == 900
    assert config["optimizer"] == {
        "gradientClip": 0.5, "learningRate": 3e-4, "beta1": 0.9, "beta2": 0.98,
        "learningRateSchedule": {"cosine": {"minRatio": 0.2}}, "warmupSteps": 10,
    }  # fmt: skip
    precision = made.document["spec"]["parallelism"]["precision"]
    assert precision == {"parameters": "bfloat16", "reduce": "bfloat16"}
    assert made.dropped[0].field == "optimizer.params.eps"
    assert "#   optimizer.params.eps (1e-08): " in made.text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"zero_optimization": {"stage": 3}}, "train_batch_size: got nothing; expected at"),
    "batches that contradict": (
        {**BATCH, "train_batch_size": 128},
        "train_batch_size: got 128; expected 64: train_micro_batch_size_per_gpu 2 x "
        "gradient_accumulation_steps 4 x 8 data-parallel workers",
    ),
    "a batch that does not divide": (
        {"train_batch_size": 63},
        "train_batch_size: got 63; expected a multiple of 8",
    ),
    "stage 4": (
        {**BATCH, "zero_optimization": {"stage": 4}},
        "zero_optimization.stage: got 4; expected 0, 1, 2 or 3",
    ),
    "a text for a number": (
        {"train_micro_batch_size_per_gpu": "two"},
        "train_micro_batch_size_per_gpu: got two; expected an integer of at least 1",
    ),
    "two formats": (
        {**BATCH, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "fp16.enabled: got true beside bf16.enabled: true; expected one of the two",
    ),
    "offload without shards": (
        {**BATCH, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "got cpu with stage 0; expected it with stage 1, 2 or 3",
    ),
    "an axis that does not fit": (
        {**BATCH, "tensor_parallel": {"autotp_size": 3}},
        "tensor x context x pipeline: got 3; expected a divisor of 8 workers",
    ),
    "a rate below 0": (
        {**BATCH, "optimizer": {"params": {"lr": -1}}},
        "optimizer.params.lr: got -1; expected a number of at least 0",
    ),
}


@pytest.mark.parametrize(("config", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_configuration_is_refused_with_its_field(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        imported(tmp_path, config)
    assert message in str(refused.value)


def test_with_a_script_only_the_mesh_is_kept(tmp_path: Path) -> None:
    config = {**BATCH, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    made = imported(tmp_path, config, script="train.py")
    assert made.document["spec"]["parallelism"] == {"shard": "world"}
    assert made.document["spec"]["entrypoint"] == {"script": "train.py"}
    dropped = {drop.field for drop in made.dropped}
    assert {"precision", "fsdp", "microBatch", "globalBatch"} <= dropped
