"""A DeepSpeed JSON configuration: ZeRO stages, batch sizes, formats, optimizer and scheduler.

Names and defaults: https://www.deepspeed.ai/docs/config-json (DeepSpeed 0.19).
"""

from __future__ import annotations

from .draft import Draft
from .keys import ConfigKeys

MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16")
"""ConfigKeys of which a DeepSpeed configuration has at least one."""
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
_ADAM = ("Adam", "AdamW", "CPUAdam", "DeepSpeedCPUAdam", "FusedAdam")
REASONS = {
    "zero_optimization.": "FSDP2 sizes its own buffers, and overlaps without this",
    "activation_checkpointing.": "DeepSpeed applies it where the script calls its checkpointing; "
    "set spec.parallelism.activationCheckpointing",
    "fp16.": "the recipe's loss scale is dynamic",
    "bf16.": "the recipe keeps float32 shards",
    "optimizer.params.": "the recipe has no such setting",
    "monitor": "`holdfast status` and /metrics show it",
    "tensorboard": "`holdfast status` and /metrics show it",
    "wandb": "`holdfast status` and /metrics show it",
    "flops_profiler": "`holdfast status --report` shows what a step costs",
    "comms_logger": "`holdfast spec plan` shows the traffic",
    "steps_per_print": "`holdfast status` shows every step",
    "wall_clock_breakdown": "`holdfast status --report` shows where the time goes",
    "elasticity": "spec.nodes.min and max make a job elastic",
    "checkpoint": "spec.checkpoint does this",
    "aio": "only NVMe offload reads it",
}
NO_COUNTERPART = "Holdfast has no such setting"


def read(keys: ConfigKeys, draft: Draft) -> None:
    """Fill the draft. Raises UserError for NVMe offload, contradictions and wrong values."""
    stated = [name for name in _BATCH if keys.has(name)]
    if not stated:
        raise keys.problem(_BATCH[2], None, f"at least one of {', '.join(_BATCH)}")
    draft.micro_batch, draft.accumulation, draft.global_batch = map(keys.count, _BATCH)
    if (draft.micro_batch, draft.global_batch) == (None, None) and draft.accumulation is None:
        keys.drop(
            _BATCH[2], "the trainer that calls DeepSpeed fills it in; set globalBatch", "auto"
        )
    for name in ("tensor_parallel.autotp_size", "tensor_parallel.tp_size"):
        draft.tensor = keys.count(name, 0) or draft.tensor
    draft.context = keys.count("sequence_parallel_size") or 1
    draft.pipeline = keys.count("pipeline.stages") or 1
    _zero(keys, draft)
    _formats(keys, draft)
    _optimizer(keys, draft)
    _world(draft)
    draft.settle_size()
    draft.settle_batch(*_BATCH)
    if isinstance(draft.reshard, int) and not isinstance(draft.reshard, bool):
        draft.shard = draft.ranks


def _world(draft: Draft) -> None:
    """All three batch sizes together give the number of data-parallel workers."""
    sizes = draft.micro_batch, draft.accumulation, draft.global_batch
    micro, accumulation, total = sizes
    if draft.nodes and draft.workers:
        return
    if micro and accumulation and total and total % (micro * accumulation) == 0:
        draft.world = draft.world or total // (micro * accumulation) * draft.inner


def _zero(keys: ConfigKeys, draft: Draft) -> None:
    stage = keys.count("zero_optimization.stage", 0) or 0
    if stage > 3:
        raise keys.problem("zero_optimization.stage", stage, "0, 1, 2 or 3")
    for part in ("offload_optimizer", "offload_param"):
        name = f"zero_optimization.{part}.device"
        device = keys.choice(name, {"cpu": "cpu", "nvme": "nvme", "none": None})
        if device == "nvme":
            raise keys.problem(
                name, "nvme", "cpu or none", "FSDP2 offloads to main memory only: use cpu and more "
                "nodes, or run this job's script with DeepSpeed itself (entrypoint.script)",
            )  # fmt: skip
        if device == "cpu" and stage == 0:
            raise keys.problem(name, "cpu with stage 0", "it with stage 1, 2 or 3")
        draft.offload = draft.offload or device == "cpu"
        if device == "cpu" and part == "offload_optimizer" and stage < 3:
            why = "kept as offload: cpu, which also moves parameters and gradients"
            keys.drop(name, why, "cpu")
    if stage == 0:
        return
    draft.shard = "rest"
    draft.reshard = stage == 3
    draft.whole_gradients = stage == 1
    group = keys.count("zero_optimization.zero_hpz_partition_size", 0) or 1
    if group > 1 and stage == 3:
        draft.reshard = group
    mics = keys.count("zero_optimization.mics_shard_size", -1) or -1
    if mics > 0:
        draft.shard = mics


def _formats(keys: ConfigKeys, draft: Draft) -> None:
    bf16, fp16 = keys.flag("bf16.enabled"), keys.flag("fp16.enabled")
    if bf16 and fp16:
        raise keys.problem("fp16.enabled", "true beside bf16.enabled: true", "one of the two")
    draft.parameters = "bfloat16" if bf16 else "float16" if fp16 else None
    if (bf16 is False and fp16 is not True) or (bf16, fp16) == (None, False):
        draft.parameters = "float32"
    reduce = keys.choice("communication_data_type", _DTYPES)
    if reduce == "float16":
        keys.drop("communication_data_type", "gradients are reduced in float32 or bfloat16", "fp16")
    else:
        draft.reduce = reduce


def _optimizer(keys: ConfigKeys, draft: Draft) -> None:
    clip = keys.number("gradient_clipping")
    if clip is not None:
        draft.optimizer["gradientClip"] = clip
    kind = keys.take("optimizer.type")
    if kind is not None and str(kind) not in _ADAM:
        keys.drop("optimizer.type", "the recipe has adamw, adamw8bit, muon and dion", kind)
    names = {"lr": "learningRate", "weight_decay": "weightDecay"}
    for name, ours in names.items():
        value = keys.number(f"optimizer.params.{name}")
        if value is not None:
            draft.optimizer[ours] = value
    betas = keys.take("optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.optimizer["beta1"], draft.optimizer["beta2"] = map(float, betas)
    elif betas not in (None, "auto"):
        raise keys.problem("optimizer.params.betas", betas, "a list of two numbers")
    _scheduler(keys, draft)


def _scheduler(keys: ConfigKeys, draft: Draft) -> None:
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = keys.take("scheduler.type")
    if kind is None:
        return
    if kind not in kinds:
        keys.drop("scheduler.type", "the recipe has cosine, linear, constant and wsd", kind)
        return
    settings = {"minRatio": 0.0} if kind == "WarmupDecayLR" else {}
    draft.optimizer["learningRateSchedule"] = {kinds[kind]: settings}
    values = {
        "warmup_num_steps": keys.count("scheduler.params.warmup_num_steps", 0),
        "total_num_steps": keys.count("scheduler.params.total_num_steps"),
    }
    if values["warmup_num_steps"] is not None:
        draft.optimizer["warmupSteps"] = values["warmup_num_steps"]
    if values["total_num_steps"] is not None:
        draft.config["steps"] = values["total_num_steps"]
    rate = keys.number("scheduler.params.warmup_max_lr")
    if rate is not None:
        draft.optimizer["learningRate"] = rate
    ratio = keys.number("scheduler.params.cos_min_ratio")
    if ratio is not None and kind == "WarmupCosineLR":
        settings["minRatio"] = ratio
