"""Configurations of `accelerate config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.preflight.importers import Imported, import_config

MACHINES = {"num_machines": 2, "num_processes": 16, "mixed_precision": "bf16"}


def imported(tmp_path: Path, config: dict[str, Any], **options: Any) -> Imported:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(config))
    made = import_config(path, **options)
    parse_job(made.text)
    return made


def fsdp(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    section = {f"fsdp_{name}": value for name, value in fields.items()}
    config = {"distributed_type": "FSDP", **MACHINES, "fsdp_config": section}
    spec = imported(tmp_path, config).document["spec"]
    assert (spec["nodes"]["max"], spec["workersPerNode"]) == (2, 8)
    found = dict(spec["parallelism"])
    assert found.pop("precision") == {"parameters": "bfloat16"}
    return found


def test_strategies_of_version_1_are_kept(tmp_path: Path) -> None:
    assert fsdp(tmp_path, sharding_strategy="FULL_SHARD") == {"shard": "world"}
    assert fsdp(tmp_path, sharding_strategy="SHARD_GRAD_OP") == {
        "shard": "world",
        "fsdp": {"reshardAfterForward": False},
    }
    assert fsdp(tmp_path, sharding_strategy="HYBRID_SHARD") == {"shard": 8}
    assert fsdp(tmp_path, sharding_strategy=5) == {
        "shard": 8,
        "fsdp": {"reshardAfterForward": False},
    }
    assert fsdp(tmp_path, sharding_strategy="NO_SHARD") == {"shard": 1}


def test_version_2_has_one_flag_for_it(tmp_path: Path) -> None:
    assert fsdp(tmp_path, version=2, reshard_after_forward=True) == {"shard": "world"}
    found = fsdp(tmp_path, version=2, reshard_after_forward=False, offload_params=True)
    assert found == {"shard": "world", "fsdp": {"reshardAfterForward": False}, "offload": "cpu"}
    found = fsdp(tmp_path, version=2, activation_checkpointing=True)
    assert found["activationCheckpointing"] == {"full": {}}


def test_every_field_is_kept_or_named(tmp_path: Path) -> None:
    config = {
        "distributed_type": "FSDP", **MACHINES, "machine_rank": 0, "main_process_ip": "10.0.0.1",
        "unheard_of": 3,
        "fsdp_config": {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True},
    }  # fmt: skip
    dropped = {drop.field: drop.why for drop in imported(tmp_path, config).dropped}
    assert dropped["fsdp_config.fsdp_backward_prefetch"] == "FSDP2 always prefetches in backward"
    assert "numbers the nodes" in dropped["machine_rank"]
    assert dropped["unheard_of"] == "Holdfast has no such setting"
    assert "distributed_type" not in dropped and "num_processes" not in dropped


def test_axes_of_megatron_and_of_parallelism_config_are_kept(tmp_path: Path) -> None:
    config = {
        "distributed_type": "MEGATRON_LM", **MACHINES,
        "megatron_lm_config": {"megatron_lm_tp_degree": 4, "megatron_lm_pp_degree": 2,
                               "megatron_lm_num_micro_batches": 8},
    }  # fmt: skip
    found = imported(tmp_path, config).document["spec"]["parallelism"]
    assert (found["tensor"], found["pipeline"]["ranks"], found["shard"]) == (4, 2, 1)
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2}
    config = {
        "distributed_type": "FSDP", **MACHINES, "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {f"parallelism_config_{k}": v for k, v in sizes.items()},
    }  # fmt: skip
    found = imported(tmp_path, config).document["spec"]["parallelism"]
    assert (found["shard"], found["tensor"]) == (4, 2)


def test_a_section_or_a_file_of_deepspeed_is_read(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    config = {"distributed_type": "DEEPSPEED", **MACHINES, "deepspeed_config": section}
    spec = imported(tmp_path, config).document["spec"]
    assert spec["parallelism"]["shard"] == "world"
    assert spec["entrypoint"]["recipe"]["config"]["globalBatch"] == 64
    zero = {"stage": 2, "overlap_comm": True}
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 32, "zero_optimization": zero})
    )
    config["deepspeed_config"] = {"deepspeed_config_file": "ds.json"}
    made = imported(tmp_path, config)
    assert made.document["spec"]["parallelism"]["fsdp"] == {"reshardAfterForward": False}
    assert "zero_optimization.overlap_comm" in [drop.field for drop in made.dropped]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": (
        {"distributed_type": "XLA"},
        "distributed_type: got XLA; expected one of NO, MULTI_GPU",
    ),
    "no processes": (
        {"distributed_type": "MULTI_GPU"},
        "number of workers: got nothing; expected it; pass --nodes and --workers",
    ),
    "processes that do not fill machines": (
        {"distributed_type": "FSDP", "num_machines": 3, "num_processes": 16},
        "num_processes: got 16; expected a multiple of num_machines (3)",
    ),
    "an unknown strategy": (
        {"distributed_type": "FSDP", **MACHINES, "fsdp_config": {"fsdp_sharding_strategy": "ALL"}},
        "fsdp_config.fsdp_sharding_strategy: got ALL; expected one of FULL_SHARD",
    ),
    "a version to come": (
        {"distributed_type": "FSDP", **MACHINES, "fsdp_config": {"fsdp_version": 3}},
        "fsdp_config.fsdp_version: got 3; expected 1 or 2",
    ),
    "an unknown format": (
        {"distributed_type": "FSDP", **MACHINES, "mixed_precision": "fp4"},
        "mixed_precision: got fp4; expected one of no",
    ),
    "a DeepSpeed file that is not there": (
        {"distributed_type": "DEEPSPEED", **MACHINES,
         "deepspeed_config": {"deepspeed_config_file": "nope.json"}},
        "deepspeed_config_file: got nope.json (No such file or directory)",
    ),
    "NVMe": (
        {"distributed_type": "DEEPSPEED", **MACHINES,
         "deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme"}},
        "offload_param.device: got nvme; expected cpu or none",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_configuration_is_refused_with_its_field(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        imported(tmp_path, config)
    assert message in str(refused.value)
