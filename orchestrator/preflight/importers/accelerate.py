"""The YAML that `accelerate config` writes: processes, FSDP 1 or 2, DeepSpeed, Megatron, formats.

Names: https://huggingface.co/docs/accelerate (1.15), and its guide FSDP1 vs FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import deepspeed
from .draft import Draft
from .keys import ConfigKeys

MARKS = ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")
_STRATEGIES: dict[str, str] = {
    "FULL_SHARD": "full", "1": "full", "SHARD_GRAD_OP": "grad", "2": "grad", "NO_SHARD": "none",
    "3": "none", "HYBRID_SHARD": "hybrid", "4": "hybrid", "HYBRID_SHARD_ZERO2": "hybrid2",
    "5": "hybrid2",
}  # fmt: skip
_FORMATS = {"no": "float32", "false": "float32", "bf16": "bfloat16", "fp16": "float16",
            "fp8": "fp8"}  # fmt: skip
_REMOVED = {
    "fsdp_backward_prefetch": "FSDP2 always prefetches in backward",
    "fsdp_forward_prefetch": "FSDP2 overlaps by itself; see spec.parallelism.fsdp.prefetchBlocks",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "Holdfast starts every rank with the same values",
    "fsdp_limit_all_gathers": "FSDP2 needs no limit",
}
REASONS = {
    **{f"fsdp_config.{name}": why for name, why in _REMOVED.items()},
    "fsdp_config.fsdp_auto_wrap_policy": "the recipe shards each block",
    "fsdp_config.fsdp_transformer_layer_cls": "the recipe shards each block",
    "fsdp_config.fsdp_min_num_params": "the recipe shards each block",
    "fsdp_config.fsdp_state_dict_type": "Holdfast always writes shards, which any mesh can read",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "the recipe trains from scratch",
    "machine_rank": "Holdfast numbers the nodes in every generation",
    "main_process_": "Holdfast chooses the address",
    "main_training_function": "only notebooks and TPUs use it",
    "rdzv_": "Holdfast is the rendezvous",
    "same_network": "spec.fabric has the network",
    "gpu_ids": "each worker gets its own GPU",
    "tpu_": "Holdfast has no TPUs",
    "commands": "Holdfast has no TPUs",
    "compute_environment": "the command's target decides: local, Kubernetes or Ray",
    "deepspeed_config.": "the recipe shards by FSDP2",
    "megatron_lm_config.": "the recipe has no such setting",
    "dynamo_config.": "the recipe compiles each block with Inductor",
    "downcast_bf16": "only TPUs use it",
}  # fmt: skip


def read(keys: ConfigKeys, draft: Draft, directory: Path) -> None:
    """Fill the draft. Raises UserError."""
    kind = str(keys.take("distributed_type") or "NO").upper()
    kinds = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
    if kind not in kinds:
        raise keys.problem("distributed_type", kind, "one of " + ", ".join(kinds))
    total, machines = keys.count("num_processes"), keys.count("num_machines")
    if not (draft.nodes and draft.workers):
        _size(keys, draft, total, machines)
    draft.on_cpu = bool(keys.flag("use_cpu")) or kind == "MULTI_CPU"
    draft.parameters = keys.choice("mixed_precision", _FORMATS)
    if draft.parameters == "fp8":
        draft.parameters, draft.float8 = "bfloat16", not draft.on_cpu
    draft.accumulation = keys.count("gradient_accumulation_steps")
    backend = str(keys.take("dynamo_config.dynamo_backend") or "NO").upper()
    if backend not in ("NO", "EAGER"):
        draft.config["compile"] = True
    _axes(keys, draft)
    if kind == "FSDP":
        _fsdp(keys, draft)
    elif kind == "MEGATRON_LM":
        _megatron(keys, draft)
    elif kind == "DEEPSPEED":
        _deepspeed(keys, draft, directory)
        return
    draft.settle_size()
    if isinstance(draft.shard, int) and draft.ranks % draft.shard:
        raise keys.problem("shard", draft.shard, f"a divisor of {draft.ranks} workers")
    micro, accumulation = "micro-batch", "gradient_accumulation_steps"
    draft.settle_batch(micro, accumulation, "global batch")


def _size(keys: ConfigKeys, draft: Draft, total: int | None, machines: int | None) -> None:
    draft.world, draft.nodes = total or draft.world, draft.nodes or machines
    if draft.world and draft.nodes and draft.world % draft.nodes:
        raise keys.problem(
            "num_processes", draft.world, f"a multiple of num_machines ({draft.nodes})",
            "num_processes counts the processes of all machines",
        )  # fmt: skip


def _axes(keys: ConfigKeys, draft: Draft) -> None:
    start = "parallelism_config.parallelism_config_"
    draft.tensor = keys.count(start + "tp_size") or 1
    draft.context = keys.count(start + "cp_size") or 1
    replicate, shard = keys.count(start + "dp_replicate_size"), keys.count(start + "dp_shard_size")
    draft.replicate = replicate
    if shard is not None and shard > 1:
        draft.shard = shard


def _fsdp(keys: ConfigKeys, draft: Draft) -> None:
    section = "fsdp_config."
    version = keys.count(section + "fsdp_version") or 1
    if version not in (1, 2):
        raise keys.problem(section + "fsdp_version", version, "1 or 2")
    strategy = keys.choice(section + "fsdp_sharding_strategy", _STRATEGIES)
    reshard = _reshard(keys, section + "fsdp_reshard_after_forward")
    kind = strategy or "full"
    draft.shard = draft.shard or (None if kind == "none" else "rest")
    draft.reshard = kind not in ("grad", "hybrid2")
    if strategy is None and reshard is not None:
        draft.reshard = reshard
    if kind in ("hybrid", "hybrid2"):
        workers = draft.workers or (draft.world or 0) // (draft.nodes or 1)
        if not workers:
            raise keys.problem("num_processes", None, "it, as HYBRID_SHARD shards within a machine")
        draft.shard = workers // draft.inner or 1
    draft.offload = bool(keys.flag(section + "fsdp_offload_params"))
    if keys.flag(section + "fsdp_activation_checkpointing"):
        draft.checkpointing = {"full": {}}


def _reshard(keys: ConfigKeys, name: str) -> bool | None:
    """The field; with fsdp_version 1 it may still have the name of a strategy."""
    value = keys.take(name)
    if value is None or isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    if str(value) not in _STRATEGIES:
        raise keys.problem(name, value, "true or false")
    return _STRATEGIES[str(value)] not in ("grad", "hybrid2")


def _megatron(keys: ConfigKeys, draft: Draft) -> None:
    section = "megatron_lm_config.megatron_lm_"
    draft.tensor = keys.count(section + "tp_degree") or 1
    draft.pipeline = keys.count(section + "pp_degree") or 1
    clip = keys.number(section + "gradient_clipping")
    if clip is not None:
        draft.optimizer["gradientClip"] = clip
    if keys.flag(section + "recompute_activations"):
        draft.checkpointing = {"selective": {}}
    if keys.flag(section + "use_distributed_optimizer"):
        draft.shard, draft.reshard, draft.whole_gradients = "rest", False, True
    batches = keys.count(section + "num_micro_batches")
    if batches is not None:
        draft.accumulation = batches


def _deepspeed(keys: ConfigKeys, draft: Draft, directory: Path) -> None:
    """The DeepSpeed file that is named, or the fields of the section as such a file has them."""
    section = "deepspeed_config."
    file = keys.take(section + "deepspeed_config_file")
    if file is not None:
        document = read_json(directory / str(file), keys)
    else:
        stage = keys.count(section + "zero_stage", 0)
        accumulation = keys.count(section + "gradient_accumulation_steps")
        document = {
            "gradient_accumulation_steps": accumulation or draft.accumulation or 1,
            "zero_optimization": {
                "stage": 2 if stage is None else stage,
                "offload_optimizer": {"device": keys.take(section + "offload_optimizer_device")},
                "offload_param": {"device": keys.take(section + "offload_param_device")},
            },
            "gradient_clipping": keys.take(section + "gradient_clipping"),
        }
    inner = ConfigKeys(document, keys.source if file is None else f"{keys.source}: {file}")
    parameters, draft.keys = draft.parameters, inner
    try:
        deepspeed.read(inner, draft)
    finally:
        draft.keys = keys
    draft.parameters = draft.parameters or parameters
    inner.drop_rest(deepspeed.REASONS, deepspeed.NO_COUNTERPART)
    keys.dropped += inner.dropped


def read_json(path: Path, keys: ConfigKeys) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        field = "deepspeed_config.deepspeed_config_file"
        raise keys.problem(field, f"{path.name} ({why})", "a DeepSpeed JSON file") from None
    if not isinstance(document, Mapping):
        raise keys.problem(path.name, type(document).__name__, "a mapping")
    return document
