"""A torchtitan TOML configuration: axes, batch, formats, optimizer, schedule, checkpoints.

Names of torchtitan 0.1 to 0.2 (torchtitan/config/job_config.py), and of the older files that have
them in [training] and [experimental].
"""

from __future__ import annotations

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.parts import part
from holdfast.orchestrator.planner.model import Architecture

from .draft import Draft
from .keys import ConfigKeys

MARKS = ("training", "parallelism", "model")
_SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved1f1b",
              "InterleavedZeroBubble": "interleavedZeroBubble",
              "ZBVZeroBubble": "zbvZeroBubble"}  # fmt: skip
_FORMATS = {"float32": "float32", "bfloat16": "bfloat16"}
_LOGGED = "`holdfast status`, `report` and /metrics show it"
REASONS = {
    "job.": "metadata.name and the command decide it",
    "profiling.": "Holdfast has no profiler",
    "metrics.": _LOGGED,
    "comm.": "spec.recovery.hangTimeoutSeconds ends a hang",
    "checkpoint.": "Holdfast keeps checkpoints in memory and on storage by itself: spec.checkpoint",
    "training.dataset": "set data.source to files of tokens",
    "training.gc_freq": "the recipe collects garbage by itself",
    "fault_tolerance.": "Holdfast restarts the job by itself",
    "model.": "the recipe reads tokens, and has one architecture",
    "float8.": "torchao's default recipe is used",
    "quantize.": "torchao's default recipe is used",
    "memory_estimation.": "`holdfast spec plan` estimates memory",
}  # fmt: skip


def read(keys: ConfigKeys, draft: Draft) -> None:
    """Fill the draft. Raises UserError."""
    _axes(keys, draft)
    _training(keys, draft)
    _optimizer(keys, draft)
    _activations(keys, draft)
    _checkpoint(keys, draft)
    draft.architecture = _architecture(keys)
    converters = keys.take("model.converters")
    if "float8" in (converters or ()) or keys.take("float8.enable_float8_linear") is True:
        draft.float8 = True
    draft.settle_size()
    draft.settle_batch("local_batch_size", "accumulation", "training.global_batch_size")


def _degree(keys: ConfigKeys, name: str, *, rest: bool = False) -> int | None:
    """The size of an axis, in [parallelism] or, in older files, in [training]."""
    for section in ("parallelism", "training", "experimental"):
        field = f"{section}.{name}"
        if keys.has(field):
            value = keys.count(field, -1 if rest else 1)
            if value == 0:
                raise keys.problem(field, 0, "at least 1, or -1 for all other workers")
            return value
    return None


def _axes(keys: ConfigKeys, draft: Draft) -> None:
    draft.replicate = _degree(keys, "data_parallel_replicate_degree") or 1
    shard = _degree(keys, "data_parallel_shard_degree", rest=True) or -1
    draft.tensor = _degree(keys, "tensor_parallel_degree") or 1
    draft.context = _degree(keys, "context_parallel_degree") or 1
    draft.pipeline = _degree(keys, "pipeline_parallel_degree") or 1
    expert = _degree(keys, "expert_parallel_degree") or 1
    if expert > 1:
        why = "the recipe has no experts"
        keys.drop("parallelism.expert_parallel_degree", why, expert)
    for section in ("parallelism", "experimental"):
        field = f"{section}.pipeline_parallel_schedule"
        if keys.has(field):
            draft.schedule = keys.choice(field, _SCHEDULES)
    reshard = keys.choice(
        "parallelism.fsdp_reshard_after_forward",
        {"default": None, "always": True, "never": False},
    )
    draft.reshard = True if reshard is None else bool(reshard)
    if shard == -1:
        draft.shard = "rest"
        return
    draft.shard = shard if shard > 1 else None
    draft.world = draft.replicate * shard * draft.inner
    if draft.nodes and not draft.workers and draft.world % draft.nodes:
        raise keys.problem("--nodes", draft.nodes, f"a divisor of {draft.world} workers")


def _training(keys: ConfigKeys, draft: Draft) -> None:
    for name in ("training.local_batch_size", "training.batch_size"):
        draft.micro_batch = draft.micro_batch or keys.count(name)
    total = keys.count("training.global_batch_size", -1)
    draft.global_batch = None if total == -1 else total
    micro = keys.count("parallelism.pipeline_parallel_microbatch_size")
    if micro is not None and draft.pipeline > 1:
        _divide(keys, draft, micro)
    draft.sequence_length = keys.count("training.seq_len")
    if (steps := keys.count("training.steps")) is not None:
        draft.config["steps"] = steps
    if (seed := keys.count("training.seed", 0)) is not None:
        draft.config["seed"] = seed
    if (clip := keys.number("training.max_norm")) is not None:
        draft.optimizer["gradientClip"] = clip
    if keys.flag("compile.enable") or keys.flag("training.compile"):
        draft.config["compile"] = True
    draft.parameters = keys.choice("training.mixed_precision_param", _FORMATS)
    draft.reduce = keys.choice("training.mixed_precision_reduce", _FORMATS)
    draft.offload = bool(keys.flag("training.enable_cpu_offload"))


def _divide(keys: ConfigKeys, draft: Draft, micro: int) -> None:
    """A pipeline passes its local batch in micro-batches."""
    local = draft.micro_batch or micro
    if local % micro:
        field = "parallelism.pipeline_parallel_microbatch_size"
        raise keys.problem(field, micro, f"a divisor of training.local_batch_size ({local})")
    draft.accumulation = (draft.accumulation or 1) * (local // micro)
    draft.micro_batch = micro
    if draft.global_batch is not None:
        draft.accumulation = None


def _optimizer(keys: ConfigKeys, draft: Draft) -> None:
    kind = keys.take("optimizer.name")
    if kind is not None and str(kind).lower() not in ("adam", "adamw"):
        keys.drop("optimizer.name", "the recipe has adamw, adamw8bit, muon and dion", kind)
    names = {"lr": "learningRate", "beta1": "beta1", "beta2": "beta2",
             "weight_decay": "weightDecay"}  # fmt: skip
    for name, ours in names.items():
        if (value := keys.number(f"optimizer.{name}")) is not None:
            draft.optimizer[ours] = value
    for name in ("lr_scheduler.warmup_steps", "training.warmup_steps"):
        if (steps := keys.count(name, 0)) is not None:
            draft.optimizer["warmupSteps"] = steps
    kinds = {"linear": "linear", "cosine": "cosine", "sqrt": "sqrt"}
    decay = keys.choice("lr_scheduler.decay_type", kinds)
    if decay == "sqrt":
        keys.drop("lr_scheduler.decay_type", "the recipe decays by cosine or linearly", decay)
    schedule, settings = (None if decay == "sqrt" else decay), dict[str, float]()
    ratio = keys.number("lr_scheduler.decay_ratio")
    if ratio is not None and draft.config.get("steps"):
        schedule = "wsd"
        settings["decaySteps"] = max(1, round(ratio * draft.config["steps"]))
        if decay == "cosine":
            why = "the last decaySteps decay linearly, with schedule wsd"
            keys.drop("lr_scheduler.decay_type", why, decay)
    for name in ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"):
        if (least := keys.number(name)) is not None:
            settings["minRatio"] = least
    if schedule or settings:
        draft.optimizer["learningRateSchedule"] = {schedule or "cosine": settings}


def _activations(keys: ConfigKeys, draft: Draft) -> None:
    modes = {"none": None, "full": "full", "selective": "selective", "memory_budget": "budget"}
    mode = keys.choice("activation_checkpoint.mode", modes)
    option = keys.take("activation_checkpoint.selective_ac_option")
    budget = keys.number("activation_checkpoint.memory_budget")
    if mode is None:
        return
    draft.checkpointing = {mode: {}}
    if mode == "selective" and option is not None and str(option) != "op":
        if not str(option).isdecimal() or int(option) < 1:
            field = "activation_checkpoint.selective_ac_option"
            raise keys.problem(field, option, "op, or every how many layers")
        draft.checkpointing = {"full": {"everyNthBlock": int(option)}}
    if mode == "budget":
        draft.checkpointing[mode] = 0.5 if budget is None else budget
        draft.config["compile"] = True


def _checkpoint(keys: ConfigKeys, draft: Draft) -> None:
    enabled = keys.flag("checkpoint.enable") or keys.flag("checkpoint.enable_checkpoint")
    interval, keep = keys.count("checkpoint.interval"), keys.count("checkpoint.keep_latest_k", 0)
    if enabled and interval is not None:
        draft.checkpoint["storage"] = {"everySteps": interval}
    if enabled and keep:
        draft.checkpoint["retention"] = {"keepLast": keep}


def _architecture(keys: ConfigKeys) -> Architecture | None:
    """The model of the catalogue that name and flavor mean."""
    name, flavor = keys.take("model.name"), keys.take("model.flavor")
    if name is None:
        return None
    wanted = f"{name}-{flavor}"
    load = part("catalogue")
    catalogue = load and load()
    try:
        model: Architecture | None = catalogue and catalogue.architecture(wanted)
    except UserError:
        model = None
    if model is None:
        keys.drop("model.flavor", f"the catalogue has no {wanted}", f"{name} {flavor}")
        return None
    if model.num_heads * model.head_dim != model.dim or not model.gated_ffn:
        keys.drop("model.flavor", "the recipe cannot build this architecture", wanted)
        return None
    return model
