"""The work of a step, and its division over ranks. Both come from a job, or from a search; every
estimate takes these two and nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.parallelism import ActivationCheckpointing
from ..api.v1alpha1.recipe import DionSettings, pretraining
from ..protocol.mesh import Mesh
from .model import Architecture, Counts, count_parameters, of_recipe

Format = Literal["float32", "bfloat16", "float16"]
WIDTHS: dict[Format, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a step, the same on any mesh."""

    model: Architecture
    counts: Counts
    sequence_length: int
    global_batch: int
    """Samples of a step."""
    optimizer: str = "adamw"
    rank_fraction: float = 0.25
    """DionSettings: rank of its updates / the shorter side of a matrix."""
    in_backward: bool = False
    """The optimizer steps each block in the backward pass."""
    compiled: bool = False
    format: Format = "bfloat16"
    """Number format of parameters and activations in forward and backward."""
    reduce_width: int = 4
    """Bytes of a gradient element that is reduced."""
    float8: bool = False
    """The matrix products of the blocks are computed in 8 bits."""
    on_gpu: bool = True
    method: Literal["full", "lora", "qlora"] = "full"
    """full: all weights are trained; else adapters beside frozen weights (see adapters.py)."""
    adapter_rank: int = 16
    own_loop: bool = False
    """fully_shard wraps the blocks and the whole model, so that embedding and head are in the root
    group; the recipe wraps them apart."""

    @property
    def width(self) -> int:
        """Bytes of a parameter or activation in forward and backward."""
        return WIDTHS[self.format]

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


class ParallelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Division of the work over ranks."""

    mesh: Mesh
    workers_per_node: int
    micro_batch: int
    """Samples of one forward pass on one rank."""
    num_micro_batches: int
    """Forward passes of one step on one rank."""
    reshard: bool | int = True
    """The same as spec.parallelism.fsdp.reshardAfterForward."""
    accumulate_whole: bool = False
    """Whole gradients stay on a rank until the last micro-batch."""
    checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    offload: bool = False
    """Shards, gradients and optimizer state are in main memory."""
    prefetch_blocks: int = 0
    """The same as spec.parallelism.fsdp.prefetchBlocks."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    chunk_tokens: int = 0
    """Tokens whose logits exist at the same time; 0: all of a micro-batch."""
    bucket_view: bool = True
    """DDP's gradients are views of its buckets."""

    @property
    def fsdp(self) -> bool:
        """FSDP2 wraps the model: it is divided, or on axes that DDP does not know."""
        mesh = self.mesh
        return mesh.num_fsdp_shards > 1 or mesh.tensor > 1 or mesh.pipeline > 1

    @property
    def num_stages(self) -> int:
        return self.mesh.pipeline * self.stages_per_rank


class StageEnds(NamedTuple):
    """Parts beside blocks in the stages of one rank of a pipeline."""

    embedding: bool
    head: bool


WHOLE = StageEnds(embedding=True, head=True)


def parts_of(layout: ParallelLayout) -> tuple[StageEnds, ...]:
    """The ranks of a pipeline that may hold most: the first and the last; with a V the first has
    both ends."""
    if layout.mesh.pipeline == 1 or layout.schedule == "zbvZeroBubble":
        return (WHOLE,)
    return (StageEnds(embedding=True, head=False), StageEnds(embedding=False, head=True))


def workload_of(job: TrainingJob) -> Workload | None:
    """None for all but the recipe pretrain: their model is not known."""
    config, precision = pretraining(job.spec.entrypoint.recipe), job.spec.parallelism.precision
    if config is None:
        return None
    model = of_recipe(config.model)
    on_gpu = job.spec.resources.num_gpus > 0
    format_ = precision.parameters
    if format_ == "auto":
        format_ = "bfloat16" if on_gpu else "float32"
    return Workload(
        model=model,
        counts=count_parameters(model),
        sequence_length=config.data.sequence_length,
        global_batch=config.global_batch,
        optimizer=config.optimizer.chosen,
        rank_fraction=(config.optimizer.dion or DionSettings()).rank_fraction,
        in_backward=config.optimizer.in_backward,
        compiled=config.compile,
        format=format_,
        reduce_width=4 if precision.reduce == "float32" else 2,
        float8=precision.linear == "float8",
        on_gpu=on_gpu,
    )


def share_of(job: TrainingJob, mesh: Mesh) -> int:
    """Samples of a step on one rank. Raises ValueError without the recipe pretrain."""
    config = pretraining(job.spec.entrypoint.recipe)
    if config is None:
        raise ValueError("a job without the recipe pretrain has no layout")
    return max(1, -(-config.global_batch // mesh.data_parallel_size))


def layout_of(job: TrainingJob, mesh: Mesh, chosen: int = 0) -> ParallelLayout:
    """Division of the job's recipe over the ranks of this mesh. `chosen`: samples of a forward pass
    where microBatch is auto; 0: as without known memory (see micro_batch.fitted_layout). Raises
    ValueError without a recipe."""
    share, config = share_of(job, mesh), pretraining(job.spec.entrypoint.recipe)
    assert config is not None
    parallelism = job.spec.parallelism
    micro_batch = config.samples_per_pass(share, mesh.pipeline, chosen)
    return ParallelLayout(
        mesh=mesh,
        workers_per_node=job.spec.workers_per_node,
        micro_batch=micro_batch,
        num_micro_batches=-(-share // micro_batch),
        reshard=parallelism.fsdp_settings.reshard_after_forward,
        accumulate_whole=parallelism.fsdp_settings.accumulate_gradients == "whole",
        checkpointing=parallelism.activation_checkpointing,
        # Only FSDP2 offloads.
        offload=parallelism.offload == "cpu" and mesh.num_fsdp_shards > 1,
        prefetch_blocks=parallelism.fsdp_settings.prefetch_blocks,
        schedule=parallelism.pipeline_schedule,
        stages_per_rank=parallelism.stages_per_rank if mesh.pipeline > 1 else 1,
        chunk_tokens=config.loss.chunk_tokens,
        bucket_view=parallelism.ddp_settings.gradient_as_bucket_view,
    )
