"""Memory of a recipe: what lies where, by formula.

Owns: the formulas, each with its source. Must not: measure. Model states are exact; transients,
activations and logits are fits (sources below), so plan to 80 % of a device.

P parameters, S ranks that share them (replicas do not count), L layers; s sequence length, b
micro-batch, h model width, f width of the feed-forward part, V vocabulary.

Sources: states, transients, activations and logits were fitted to FSDPMemTracker traces of FSDP2
with fp32 shards; the same terms are in Rajbhandari et al. 2020 (ZeRO, section 3) and Korthikanti et
al. 2022 (Reducing Activation Recomputation, section 4), whose GELU figures are lower than SwiGLU's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .. import limits
from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.recipe import Pretrain
from ..protocol.mesh import Mesh
from .model import Counts, count_parameters

STATE_BYTES = 16
"""Of one parameter: 4 master copy, 4 gradient, 8 the two moments of AdamW."""

CHECKPOINT_BYTES = 12
"""Of one parameter: as above without the gradient."""

USABLE = 0.8
"""Of a device's memory: 454 published runs below this never ran out (arXiv 2411.06465)."""

Where = Literal["device", "node", "storage"]


class MemoryEstimate(msgspec.Struct, frozen=True):
    """One line of the table: bytes of one worker (device), node, or checkpoint (storage)."""

    what: str
    where: Where
    num_bytes: int
    formula: str
    exact: bool = False


def parameter_bytes(job: TrainingJob) -> int:
    """Bytes of one parameter, or activation element, in forward and backward."""
    precision = job.spec.parallelism.precision.parameters
    if precision == "auto":
        precision = "bfloat16" if job.spec.resources.gpu else "float32"
    return 4 if precision == "float32" else 2


def micro_batch(settings: Pretrain, mesh: Mesh) -> int:
    """Samples of one forward pass on one rank."""
    share = max(1, -(-settings.global_batch // mesh.data_parallel_size))
    return share if settings.micro_batch == "auto" else min(settings.micro_batch, share)


def num_micro_batches(settings: Pretrain, mesh: Mesh) -> int:
    """Forward passes of one step on one rank."""
    share = max(1, -(-settings.global_batch // mesh.data_parallel_size))
    return -(-share // micro_batch(settings, mesh))


def model_state_bytes(counts: Counts, num_shards: int) -> int:
    """Master copy, gradients and optimizer state of one rank."""
    return -(-STATE_BYTES * counts.total // num_shards)


def table(job: TrainingJob, mesh: Mesh) -> tuple[MemoryEstimate, ...]:
    """All lines for a recipe; empty for scripts and modules, whose model we do not know."""
    if job.spec.entrypoint.recipe is None:
        return ()
    settings = job.spec.entrypoint.recipe.config
    counts = count_parameters(settings.model)
    return (
        *_states(job, mesh, counts),
        *_step(job, mesh, settings, counts),
        *_tiers(job, mesh, counts),
    )


def device_bytes(rows: tuple[MemoryEstimate, ...]) -> int:
    """Peak of one worker's device: the sum of its lines."""
    return sum(row.num_bytes for row in rows if row.where == "device")


def _states(job: TrainingJob, mesh: Mesh, counts: Counts) -> list[MemoryEstimate]:
    parallelism, width = job.spec.parallelism, parameter_bytes(job)
    total = counts.total
    offload = parallelism.offload == "cpu"
    formula = f"{STATE_BYTES} P / S = 16 x {total:,} / {mesh.num_shards}"
    states = model_state_bytes(counts, mesh.num_shards)
    what = "model states: fp32 shards, gradients, AdamW moments"
    rows = [MemoryEstimate(what, "node" if offload else "device", states, formula, exact=True)]
    keep = parallelism.reshard_after_forward
    if mesh.shard > 1 and keep is False:
        formula = f"{width} P: reshardAfterForward is false"
        rows.append(MemoryEstimate("gathered parameters", "device", width * total, formula))
    elif mesh.shard > 1 and keep is not True and keep > 1:
        formula = f"{width} P / {keep}: reshardAfterForward is {keep}"
        rows.append(MemoryEstimate("gathered parameters", "device", width * total // keep, formula))
    return rows


def _step(job: TrainingJob, mesh: Mesh, settings: Pretrain, counts: Counts) -> list[MemoryEstimate]:
    model, width = settings.model, parameter_bytes(job)
    s, b, h = settings.data.sequence_length, micro_batch(settings, mesh), model.dim
    rows = []
    if mesh.shard > 1:
        # Current and prefetched block, its gradient, and the fp32 input of the reduce-scatter.
        factor = 3 * width + 4
        size = factor * counts.largest_block
        formula = f"{factor} x the largest block ({counts.largest_block:,})"
        rows.append(MemoryEstimate("transient parameters and gradients", "device", size, formula))
    # 28 + 8f/h bytes per element were fitted in bfloat16; float32 doubles them.
    scale = width / 2
    layer = scale * s * b * h * (28 + 8 * model.ffn / h)
    boundary = scale * 2 * s * b * h
    checkpointing = job.spec.parallelism.activation_checkpointing
    if checkpointing.mode == "full":
        wrapped = model.num_layers // checkpointing.every_nth_block
        bare = model.num_layers - wrapped
        size = int(wrapped * boundary + bare * layer + layer)
        formula = f"{wrapped} x 2sbh, {bare} + 1 live x sbh(28 + 8f/h); s {s}, b {b}, h {h}"
    else:
        size = int(model.num_layers * layer)
        formula = f"L sbh(28 + 8f/h); L {model.num_layers}, s {s}, b {b}, h {h}, f {model.ffn}"
    if scale != 1:
        formula += f"; x {scale:g} for float32"
    rows.append(MemoryEstimate("activations", "device", size, formula))
    size = 12 * s * b * model.vocab_size
    formula = f"12 sbV: fp32 cross-entropy; V {model.vocab_size}"
    rows.append(MemoryEstimate("logits", "device", size, formula))
    if job.spec.resources.gpu:
        rows.append(
            MemoryEstimate("CUDA context and NCCL", "device", 2 * 10**9, "1 to 2 GB on any job")
        )
    return rows


def _tiers(job: TrainingJob, mesh: Mesh, counts: Counts) -> list[MemoryEstimate]:
    checkpoint, workers = job.spec.checkpoint, job.spec.workers_per_node
    shard = -(-CHECKPOINT_BYTES * counts.total // mesh.num_shards)
    rows = []
    if checkpoint.memory.every_steps:
        buffers = limits.STAGING_BUFFERS
        size = buffers * shard * workers
        formula = f"{workers} workers x {buffers} buffers x 12 P / {mesh.num_shards}"
        rows.append(
            MemoryEstimate("memory tier: staged checkpoints", "node", size, formula, exact=True)
        )
        if needs_buddy(job, mesh):
            copies = 3  # two are kept; the buffer that one arrives in stays for the next
            formula = f"{workers} workers x {copies} copies x 12 P / {mesh.num_shards}"
            size = copies * shard * workers
            rows.append(MemoryEstimate("memory tier: copies for the buddy", "node", size, formula))
    size = CHECKPOINT_BYTES * counts.total
    rows.append(MemoryEstimate("one checkpoint", "storage", size, "12 P", exact=True))
    return rows


def needs_buddy(job: TrainingJob, mesh: Mesh) -> bool:
    """Whether agents copy what they stage to another node: no replica group holds it too."""
    buddy = job.spec.checkpoint.memory.buddy
    several = mesh.world_size > job.spec.workers_per_node
    return several and (buddy == "always" or (buddy == "auto" and mesh.replicate == 1))
