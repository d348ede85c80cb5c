"""Fields that the models accept and that would have no effect, or another one than they promise.

Only what the form of the spec cannot exclude: settings of one choice stand inside it. Checked when
a job is submitted. A job that runs already keeps its spec: its journal holds it.

A check yields problems in the `field: got; expected; fix` form, with fields below spec.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.orchestrator.errors import Problem

from . import mesh_checks
from .job import JobSpec, TrainingJob
from .parallelism import Parallelism, PipelineAxis
from .recipe import Pretrain, RecipeConfig, pretraining
from .resilience import OwnCheckpointGuard

CONFIG = "entrypoint.recipe.config."
ROW_OF_8_BITS = 256
"""Values of a row that share a scale, see adamw8bit.py."""
SIDE_OF_FLOAT8 = 16
"""Divisor of both sides of a matrix that torchao converts, see float8.py."""
RECIPE_ONLY = ("precision", "activation_checkpointing", "offload", "ddp", "fsdp")


def without_effect(job: TrainingJob, *, as_written: bool = False) -> list[Problem]:
    """Every such field with the fix. `as_written`: the job is as a user wrote it; an API server
    fills in defaults."""
    texts = [*_effects(job.spec), *_elasticity_effects(job.spec, as_written)]
    return [Problem.from_text(f"spec.{text}") for text in texts]


def _effects(spec: JobSpec) -> Iterator[str]:
    mesh = spec.parallelism
    if spec.entrypoint.recipe is None:
        yield from _script_effects(spec)
    else:
        config, ours = spec.entrypoint.recipe.config, pretraining(spec.entrypoint.recipe)
        yield from _precision_effects(spec, mesh, ours)
        yield from _shard_effects(spec, mesh, config, ours)
        yield from _batch_effects(mesh, config)
        yield from _activation_effects(mesh, config)
        if ours is not None:
            yield from _model_effects(mesh, ours)
            yield from _optimizer_effects(spec, mesh, ours)
    yield from _tensor_axis_effects(spec)
    yield from _guard_effects(spec)
    gpus, accelerator = spec.resources.gpu, spec.ray.accelerator_type
    if spec.recovery.gpu_standbys and gpus not in ("auto", 1):
        yield (
            f"recovery.gpuStandbys: got true with resources.gpu {gpus}; expected it with one GPU "
            f"per worker; set spec.resources.gpu: 1, or remove the field"
        )
    if accelerator is not None and gpus == 0:
        yield (
            f"ray.acceleratorType: got {accelerator} for a job on CPUs; expected it for a job on "
            f"GPUs; spec.resources.gpu: 1, or remove the field"
        )


def _script_effects(spec: JobSpec) -> Iterator[str]:
    program = spec.entrypoint.program
    if what := program.python or " ".join(program.runner) or " ".join(program.words[:1]):
        expected = (
            f"expected it for scripts and modules of Holdfast's own Python; {what} imports and "
            f"starts everything itself; remove the field"
        )
        if spec.preload:
            yield f"preload: got modules for {what}; {expected}"
        if spec.recovery.gpu_standbys:
            yield f"recovery.gpuStandbys: got true with {what}; {expected}"
    mesh = spec.parallelism
    fields = {name: Parallelism.model_fields[name] for name in RECIPE_ONLY}
    decided = [f.alias or n for n, f in fields.items() if getattr(mesh, n) != f.default]
    if mesh.pipeline and mesh.pipeline != PipelineAxis(ranks=mesh.pipeline_ranks):
        decided.append("pipeline")
    for field in decided:
        yield (
            f"parallelism.{field}: got a value for a script or module; expected it for a recipe "
            f"only; your own loop decides this, where it calls fully_shard or torch.autocast; "
            f"remove the field"
        )


def _tensor_axis_effects(spec: JobSpec) -> Iterator[str]:
    if problem := mesh_checks.tensor_over_nodes(spec):
        yield problem
    mesh, workers = spec.parallelism, spec.workers_per_node
    if mesh.tensor_over_nodes and workers % mesh.tensor == 0:
        yield (
            f"parallelism.tensorOverNodes: got true with tensor {mesh.tensor} and {workers} "
            f"workers on a node; expected it with a tensor axis that spans nodes; remove the field"
        )


def _elasticity_effects(spec: JobSpec, as_written: bool) -> Iterator[str]:
    nodes, workers, allowed = spec.nodes, spec.workers_per_node, spec.elasticity
    low, full = nodes.min * workers, nodes.max * workers
    chosen = nodes.min > 1 or (as_written and "min" in nodes.model_fields_set)
    if allowed == "fixed" and chosen and nodes.min < nodes.max:
        yield (
            f"nodes.min: got {nodes.min} with elasticity: fixed; expected {nodes.max}; set "
            f"nodes.min: {nodes.max}, or elasticity: any"
        )
    if isinstance(allowed, str):
        return
    for size in (count for count in allowed if not low <= count <= full):
        yield (
            f"elasticity: got {size} workers; expected sizes from {low} (nodes.min {nodes.min} x "
            f"workersPerNode {workers}) to {full} (nodes.max {nodes.max} x {workers}); remove it, "
            f"or change nodes"
        )
    for size in {count: None for count in allowed if allowed.count(count) > 1}:
        yield f"elasticity: got {size} workers more than once; expected each size once; write one"
    if max(allowed) < full:
        yield (
            f"elasticity: got at most {max(allowed)} workers; expected the full size of {full} "
            f"among them; add {full}, or set nodes.max: {max(allowed) // workers}"
        )


def _guard_effects(spec: JobSpec) -> Iterator[str]:
    guard = spec.checkpoint.guard
    if spec.entrypoint.recipe is not None and guard != OwnCheckpointGuard():
        yield (
            "checkpoint.guard: got it with a recipe; expected it for what has checkpoints of its "
            "own: scripts and commands; remove the field"
        )
    elif spec.entrypoint.resume_args and guard.chosen == "never":
        yield (
            "entrypoint.resumeArgs: got it with checkpoint.guard: {never: {}}; expected it with "
            "the guard, which finds checkpoints; remove one of the two"
        )


# -- recipe -------------------------------------------------------------------------------------
def _precision_effects(spec: JobSpec, mesh: Parallelism, config: Pretrain | None) -> Iterator[str]:
    if mesh.precision.reduce == "bfloat16" and _world(spec) == mesh.tensor * mesh.pipeline_ranks:
        yield (
            "parallelism.precision.reduce: got bfloat16 without ranks that divide the data; "
            "expected float32, or more workers; the gradients of one copy are not reduced"
        )
    if mesh.precision.linear != "float8":
        return
    got = "parallelism.precision.linear: got float8"
    if spec.resources.gpu == 0:
        yield (
            f"{got} for a job on CPUs; expected auto; use GPUs of compute capability 8.9 or above, "
            f"or linear: auto"
        )
    if mesh.tensor > 1:
        yield (
            f"{got} with parallelism.tensor {mesh.tensor}; expected it without a tensor axis; the "
            f"columns of a weight share scales, and the axis divides them; remove one of the two"
        )
    if config is None:
        yield f"{got} with another recipe than pretrain; expected auto; use linear: auto"
    elif config.model.dim % SIDE_OF_FLOAT8:
        yield (
            f"{got} with model.dim {config.model.dim}; expected a multiple of {SIDE_OF_FLOAT8}; no "
            f"matrix of a block has two such sides; change model.dim, or use linear: auto"
        )


def _shard_effects(
    spec: JobSpec, mesh: Parallelism, config: RecipeConfig, ours: Pretrain | None
) -> Iterator[str]:
    """Problems of fields that only FSDP2 has, or only DDP."""
    one_copy = (mesh.shard in (1, "auto") and mesh.context == 1) or _world(spec) == 1
    shard, whole = f"shard {mesh.shard}", "every rank has the whole model"
    if mesh.shard == "auto":
        shard, whole = "shard: auto", "auto may choose 1, where it has no effect"
    fix = f"{whole}; set parallelism.shard to a number above 1, or world"
    if mesh.offload == "cpu" and spec.resources.gpu == 0:
        yield (
            "parallelism.offload: got cpu for a job on CPUs; expected none; everything is in main "
            "memory already"
        )
    elif mesh.offload == "cpu" and one_copy:
        yield f"parallelism.offload: got cpu with {shard}; expected none, or a shard above 1; {fix}"
    if mesh.fsdp and one_copy:
        yield f"parallelism.fsdp: got it with {shard}; expected it with a shard above 1; {fix}"
    ahead = mesh.fsdp_settings.prefetch_blocks
    if ours is not None and ahead >= ours.model.num_layers:
        yield (
            f"parallelism.fsdp.prefetchBlocks: got {ahead}; expected less than model.numLayers "
            f"({ours.model.num_layers}); lower it, or remove the field"
        )
    if mesh.ddp and (mesh.inner > 1 or _world(spec) == 1):
        got = "one worker" if _world(spec) == 1 else "a model that an axis divides"
        yield (
            f"parallelism.ddp: got it for {got}; expected it with several workers and no tensor or "
            f"context axis; remove the field"
        )
    if mesh.ddp_settings.static_graph and config.micro_batch != "auto":
        yield (
            f"parallelism.ddp.staticGraph: got true with microBatch: {config.micro_batch}; "
            f"expected it with microBatch: auto; with a static graph DDP reduces in every "
            f"backward, and cannot wait for the last micro-batch; remove one of the two"
        )


def _batch_effects(mesh: Parallelism, config: RecipeConfig) -> Iterator[str]:
    size = config.micro_batch
    if mesh.fsdp_settings.accumulate_gradients == "whole" and size == "auto":
        yield (
            "parallelism.fsdp.accumulateGradients: got whole with microBatch: auto; expected it "
            "with several micro-batches; with one nothing is accumulated; set microBatch, or "
            "remove the field"
        )
    if size != "auto" and size > config.global_batch:
        yield (
            f"{CONFIG}microBatch: got {size}; expected at most globalBatch "
            f"({config.global_batch}); use auto, or a smaller number"
        )


def _activation_effects(mesh: Parallelism, config: RecipeConfig) -> Iterator[str]:
    settings = mesh.activation_checkpointing
    where = f"parallelism.activationCheckpointing.{settings.chosen}"
    if settings.budget is not None and not config.compile:
        yield (
            f"{where}: got it without compile; expected it with {CONFIG}compile: true; "
            f"torch.compile chooses what is recomputed; set compile: true, or use selective: {{}}"
        )


def _model_effects(mesh: Parallelism, config: Pretrain) -> Iterator[str]:
    samples = config.data.validation.samples
    if samples != "auto" and not config.evaluate_every_steps:
        yield (
            f"{CONFIG}data.validation.samples: got {samples} without evaluateEverySteps; expected "
            f"it with an evaluation; set evaluateEverySteps, or remove the field"
        )
    settings, blocks = mesh.activation_checkpointing, config.model.num_layers // mesh.pipeline_ranks
    where = f"parallelism.activationCheckpointing.{settings.chosen}"
    if settings.blocks and settings.blocks.every_nth_block > blocks:
        yield (
            f"{where}.everyNthBlock: got {settings.blocks.every_nth_block}; expected at most "
            f"{blocks}, the blocks of a rank; no block would be recomputed; lower it, or remove "
            f"activationCheckpointing"
        )


def _optimizer_effects(spec: JobSpec, mesh: Parallelism, config: Pretrain) -> Iterator[str]:
    model, optimizer, chosen = config.model, config.optimizer, config.optimizer.chosen
    got = f"{CONFIG}optimizer.{chosen}: got it with"
    if chosen == "adamw8bit" and model.dim % ROW_OF_8_BITS and model.ffn % ROW_OF_8_BITS:
        yield (
            f"{got} model.dim {model.dim} and ffnDim {model.ffn}; expected a multiple of "
            f"{ROW_OF_8_BITS} among them; no matrix has rows whose moments can have 8 bits; change "
            f"a size, or use adamw"
        )
    if chosen != "adamw" and mesh.offload == "cpu":
        yield f"{got} offload: cpu; expected adamw, or no offload; its step is on the device"
    if chosen != "adamw" and mesh.tensor > 1:
        yield (
            f"{got} parallelism.tensor {mesh.tensor}; expected adamw with a tensor axis; it works "
            f"on the rows that FSDP2 divides; remove one of the two"
        )
    # Each backward is a step, whose gradients are gone when all of them would be known. DDP reduces
    # gradients later, and older versions of torch copy offloaded parameters' gradients.
    world, clip, size = _world(spec), optimizer.gradient_clip, config.micro_batch
    one_copy = (mesh.shard in ("auto", 1) or mesh.replicate == world) and mesh.context == 1
    half, shard = mesh.precision.parameters == "float16", f"parallelism.shard {mesh.shard}"
    reasons = (
        (clip > 0, f"optimizer.gradientClip {clip:g}", "set gradientClip: 0"),
        (size != "auto", f"microBatch {size}", "set microBatch: auto"),
        (mesh.offload == "cpu", "parallelism.offload cpu", "set offload: none"),
        (half, "precision.parameters float16", "use bfloat16"),
        (one_copy and world > 1, f"{shard} and several workers", "set a shard above 1, or world"),
        (mesh.tensor * mesh.pipeline_ranks > 1, "a tensor or pipeline axis", "remove the axis"),
    )
    for wrong, other, fix in reasons:
        if wrong and optimizer.in_backward:
            yield (
                f"{CONFIG}optimizer.adamw.inBackward: got true with {other}; expected it without; "
                f"{fix}, or remove inBackward"
            )


def _world(spec: JobSpec) -> int:
    """Workers with nodes.max nodes."""
    return spec.nodes.max * spec.workers_per_node
