"""Costs of training: parameters and FLOPs of the recipe's model, memory, and network traffic.

Model states are exact; transients, activations and logits are fits, so plan to 80 % of a device.
The counts equal those of workers/training/models (tested).

P parameters, S ranks that share them (replicas do not count), R replica groups, L layers; s
sequence length, b micro-batch, m micro-batches, h model width, f width of the feed-forward part, V
vocabulary; w bytes of a parameter in forward and backward, g bytes of a gradient element when it is
reduced; T ranks of the tensor axis, which divide P in the rows of the other axes; C ranks of the
context axis, which divide s, and P together with those of the shard axis: S = shard x C.

Sources: states, transients, activations and logits were fitted to FSDPMemTracker traces of FSDP2
with fp32 shards; the same terms are in Rajbhandari et al. 2020 (ZeRO, section 3) and Korthikanti et
al. 2022 (Reducing Activation Recomputation, section 4), whose GELU figures are lower than SwiGLU's.
Traffic: ZeRO, section 7, in bytes instead of elements; FSDP2 gathers in the parameter format.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.parallelism import ActivationCheckpointing
from ..api.v1alpha1.recipe import Model, Pretrain
from ..protocol.facts import NodeFacts
from ..protocol.host_memory import (
    BUDDY_BUFFERS,
    BUFFERS,
    COPIES,
    HostMemory,
    HostRoom,
    plan_host_memory,
)
from ..protocol.mesh import Mesh


# -- the model ----------------------------------------------------------------------------------
class Counts(msgspec.Struct, frozen=True):
    """Number of parameters of each FSDP group: embedding, one layer, and norm with head."""

    embedding: int
    layer: int
    head: int
    num_layers: int

    @property
    def total(self) -> int:
        return self.embedding + self.num_layers * self.layer + self.head

    @property
    def largest_block(self) -> int:
        return max(self.embedding, self.layer, self.head)


def count_parameters(model: Model) -> Counts:
    """Exact counts for RMSNorm, grouped-query attention without biases, SwiGLU, untied head."""
    d, head_dim = model.dim, model.dim // model.num_heads
    attention = d * d + 2 * d * model.kv_heads * head_dim + d * d  # query, key and value, output
    return Counts(
        embedding=model.vocab_size * d,
        layer=attention + 3 * d * model.ffn + 2 * d + 2 * head_dim * model.qk_norm,
        head=d + d * model.vocab_size,
        num_layers=model.num_layers,
    )


def flops_per_token(settings: Pretrain) -> float:
    """Model FLOPs of one token, forward and backward, without recomputation.

    6 x (parameters - embedding) + 6 x layers x heads x 2 head_dim x sequence, attention counted in
    full although it is causal. Source: TorchTitan, get_dense_model_nparams_and_flops.
    """
    model, counts = settings.model, count_parameters(settings.model)
    attention = 6 * model.num_layers * 2 * model.dim * settings.data.sequence_length
    return 6.0 * (counts.total - counts.embedding) + attention


# -- memory -------------------------------------------------------------------------------------
BYTES_IN_8_BITS = 2 * (1 + 4 / 256)
"""Of the two moments of a parameter: an index of one byte, and 4 bytes for each 256 values."""

USABLE = 0.8
"""Share of a device's memory: 454 published runs below it never ran out (arXiv 2411.06465)."""

PROCESS_BYTES = 2**30
"""Main memory of a worker process beside tensors: the interpreter, torch's libraries and a CUDA
context. An assumption; a CPU worker of the recipe has 0.3 GiB."""

MemoryOwner = Literal["device", "node", "storage"]


class MemoryEstimate(msgspec.Struct, frozen=True):
    """One row: bytes of one worker (device), of one node, or of one checkpoint (storage)."""

    what: str
    where: MemoryOwner
    num_bytes: int
    formula: str
    exact: bool = False


def parameter_bytes(job: TrainingJob) -> int:
    """Bytes of one parameter or activation element in forward and backward."""
    precision = job.spec.parallelism.precision.parameters
    if precision == "auto":
        precision = "bfloat16" if job.spec.resources.num_gpus else "float32"
    return 4 if precision == "float32" else 2


def micro_batch(settings: Pretrain, mesh: Mesh) -> int:
    """Samples of one forward pass on one rank."""
    share = max(1, -(-settings.global_batch // mesh.data_parallel_size))
    return settings.samples_per_pass(share, mesh.pipeline)


def num_micro_batches(settings: Pretrain, mesh: Mesh) -> int:
    """Forward passes of one step on one rank."""
    share = max(1, -(-settings.global_batch // mesh.data_parallel_size))
    return -(-share // micro_batch(settings, mesh))


def stage_parameters(counts: Counts, mesh: Mesh) -> int:
    """Parameters of the largest stage of a pipeline, which the ranks of its other axes divide."""
    if mesh.pipeline == 1:
        return counts.total
    layers = counts.num_layers // mesh.pipeline
    return layers * counts.layer + max(counts.embedding, counts.head)


_STATE_OF = {
    "adamw": "AdamW moments",
    "adamw8bit": "AdamW moments of 8 bits",
    "muon": "momentum of Muon",
    "dion": "momentum of Dion",
}


def moment_bytes(settings: Pretrain) -> float:
    """Bytes of optimizer state per parameter, averaged over the model. Exact for adamw; others keep
    norms and small matrices as adamw does, which is not counted, nor are the factors of dion."""
    model, name = settings.model, settings.optimizer.name
    counts = count_parameters(model)
    if name == "adamw8bit" and model.dim % 256 == 0:
        other = model.num_layers * model.dim * model.ffn * (model.ffn % 256 != 0)
        return (BYTES_IN_8_BITS * (counts.total - other) + 8 * other) / counts.total
    if name in ("muon", "dion"):
        in_blocks = counts.num_layers * counts.layer
        return (4 * in_blocks + 8 * (counts.total - in_blocks)) / counts.total
    return 8


def state_bytes(settings: Pretrain) -> float:
    """Bytes per parameter: 4 master copy, 4 gradient, the optimizer's."""
    return 8 + moment_bytes(settings)


def checkpoint_bytes(settings: Pretrain) -> float:
    """Bytes per parameter: as state_bytes without the gradient."""
    return 4 + moment_bytes(settings)


def model_state_bytes(settings: Pretrain, mesh: Mesh) -> int:
    """Bytes of master copy, gradients and optimizer state of one rank."""
    return _of_one_rank(state_bytes(settings), settings, mesh)


def shard_bytes(settings: Pretrain, mesh: Mesh) -> int:
    """What one worker stages."""
    return _of_one_rank(checkpoint_bytes(settings), settings, mesh)


def _of_one_rank(per_parameter: float, settings: Pretrain, mesh: Mesh) -> int:
    parameters = stage_parameters(count_parameters(settings.model), mesh)
    return math.ceil(per_parameter * parameters / (mesh.num_shards // mesh.pipeline))


def memory_table(
    job: TrainingJob, mesh: Mesh, host: HostMemory | None = None
) -> tuple[MemoryEstimate, ...]:
    """All rows for a recipe; empty for scripts and modules, whose model is unknown. `host`: what a
    node's memory holds, as plan_host says; None: everything."""
    if job.spec.entrypoint.recipe is None:
        return ()
    settings = job.spec.entrypoint.recipe.config
    counts = count_parameters(settings.model)
    return (
        *_states(job, mesh, counts),
        *_step(job, mesh, settings, counts),
        *_tiers(job, mesh, counts, host),
    )


def device_bytes(rows: tuple[MemoryEstimate, ...]) -> int:
    """Peak memory of one worker's device: the sum of its rows."""
    return sum(row.num_bytes for row in rows if row.where == "device")


def _states(job: TrainingJob, mesh: Mesh, counts: Counts) -> list[MemoryEstimate]:
    parallelism, width = job.spec.parallelism, parameter_bytes(job)
    total, ranks = stage_parameters(counts, mesh), mesh.num_shards // mesh.pipeline
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    per = f"{state_bytes(recipe.config):.4g}"
    formula = f"{per} P / S = {per} x {total:,} / {ranks}{_largest_stage(mesh)}"
    states = model_state_bytes(recipe.config, mesh)
    name = recipe.config.optimizer.name
    what = f"model states: fp32 shards, gradients, {_STATE_OF[name]}"
    where: MemoryOwner = "device"
    if parallelism.offload == "cpu" and mesh.num_fsdp_shards > 1:  # only FSDP2 offloads
        workers, where = job.spec.workers_per_node, "node"
        formula, states = f"{workers} workers x {formula}", workers * states
    # Every rank of a tensor axis has the norms whole, which are not counted.
    exact = mesh.tensor * mesh.pipeline == 1 and name == "adamw"
    rows = [MemoryEstimate(what, where, states, formula, exact=exact)]
    keep = parallelism.reshard_after_forward
    if mesh.pipeline > 1:
        # Kept from the first micro-batch to the last; gradients are summed in fp32.
        formula = f"({width} + 4) P{_by(mesh)}{_largest_stage(mesh)}"
        size = (width + 4) * total // mesh.tensor
        rows.append(
            MemoryEstimate("gathered parameters, summed gradients", "device", size, formula)
        )
    elif mesh.num_fsdp_shards > 1 and keep is False:
        formula = f"{width} P{_by(mesh)}: reshardAfterForward is false"
        size = width * total // mesh.tensor
        rows.append(MemoryEstimate("gathered parameters", "device", size, formula))
    elif mesh.num_fsdp_shards > 1 and keep is not True and keep > 1:
        formula = f"{width} P{_by(mesh)} / {keep}: reshardAfterForward is {keep}"
        size = width * total // mesh.tensor // keep
        rows.append(MemoryEstimate("gathered parameters", "device", size, formula))
    if mesh.num_fsdp_shards > 1 and parallelism.accumulate_gradients == "whole":
        reduce = 4 if parallelism.precision.reduce == "float32" else 2
        formula = f"{reduce} P{_by(mesh)}: accumulateGradients is whole"
        size = reduce * total // mesh.tensor
        rows.append(MemoryEstimate("whole gradients", "device", size, formula))
    return rows


def _step(job: TrainingJob, mesh: Mesh, settings: Pretrain, counts: Counts) -> list[MemoryEstimate]:
    model, width = settings.model, parameter_bytes(job)
    s = settings.data.sequence_length // mesh.context
    b, h = micro_batch(settings, mesh), model.dim
    rows = []
    if mesh.num_fsdp_shards > 1 and mesh.pipeline == 1:
        # Current and prefetched block, its gradient, and the fp32 input of the reduce-scatter.
        factor = 3 * width + 4
        size = factor * counts.largest_block // mesh.tensor
        formula = f"{factor} x the largest block ({counts.largest_block:,}){_by(mesh)}"
        rows.append(MemoryEstimate("transient parameters and gradients", "device", size, formula))
    # 28 + 8f/h bytes per element were fitted in bfloat16; float32 doubles them.
    # With sequence parallel the tensor axis divides all of them (Korthikanti et al., table 2).
    # A pipeline divides the layers, and has several micro-batches under way.
    flight = _in_flight(job, mesh, settings) / mesh.pipeline
    scale = width / 2 / mesh.tensor
    sbh = scale * s * b * h
    layer = sbh * (28 + 8 * model.ffn / h)
    checkpointing = job.spec.parallelism.activation_checkpointing
    if checkpointing.mode in ("full", "selective"):
        wrapped = model.num_layers // checkpointing.every_nth_block
        bare = model.num_layers - wrapped
        per_element, what = _kept_per_element(checkpointing, model)
        size = int(flight * (wrapped * sbh * per_element + bare * layer) + layer)
        formula = f"{wrapped} x {what}, {bare} + 1 live x sbh(28 + 8f/h); s {s}, b {b}, h {h}"
    elif checkpointing.mode == "budget":
        of_block = 2 * sbh + checkpointing.budget * (layer - 2 * sbh)
        size = int(flight * model.num_layers * of_block)
        share = f"{checkpointing.budget:g}"
        formula = f"L (2sbh + {share} x the rest of sbh(28 + 8f/h)); L {model.num_layers}, s {s}"
    else:
        size = int(flight * model.num_layers * layer)
        formula = f"L sbh(28 + 8f/h); L {model.num_layers}, s {s}, b {b}, h {h}, f {model.ffn}"
    if width != 2:
        formula += f"; x {width / 2:g} for float32"
    formula += _by(mesh)
    if mesh.pipeline > 1:
        formula += f"; x {flight:.2g} for the micro-batches in {mesh.pipeline} stages"
    rows.append(MemoryEstimate("activations", "device", size, formula))
    size, what = 12 * s * b * model.vocab_size // mesh.tensor, f"sb{_by(mesh)}"
    if settings.loss.chunk_tokens:
        size = 12 * min(s * b, settings.loss.chunk_tokens) * model.vocab_size
        what = f"loss.chunkTokens {settings.loss.chunk_tokens}"
    formula = f"12 V x {what}: fp32 cross-entropy; V {model.vocab_size}"
    rows.append(MemoryEstimate("logits", "device", size, formula))
    if mesh.context > 1:
        # Forward gathers keys and values in place of a ring; backward passes on fp32 gradients.
        size = (width * mesh.context + 2 * 4) * s * b * _key_value_dim(model, mesh)
        formula = f"({width} C + 8) sb x {_key_value_dim(model, mesh)}; C {mesh.context}, s {s}"
        rows.append(MemoryEstimate("keys and values of the others", "device", size, formula))
    if job.spec.resources.num_gpus:
        rows.append(
            MemoryEstimate("CUDA context and NCCL", "device", 2 * 10**9, "1 to 2 GB on any job")
        )
    return rows


def _kept_per_element(settings: ActivationCheckpointing, model: Model) -> tuple[float, str]:
    """Bytes that a recomputed block keeps per element of its input, in 2-byte numbers: the input,
    and with mode selective the outputs of the kept operations."""
    if settings.mode == "full":
        return 2, "2sbh"
    kv, f = model.kv_heads / model.num_heads, model.ffn / model.dim
    kept = {"matmul": 2 * (3 + 2 * kv + 2 * f), "attention": 2}
    total = 2 + sum(kept[name] for name in set(settings.keep))
    return total, f"{total:g}sbh with the results of {' and '.join(settings.keep)}"


def _key_value_dim(model: Model, mesh: Mesh) -> int:
    """Numbers of a token's keys and values in one layer, on one rank of the tensor axis."""
    return 2 * model.kv_heads * (model.dim // model.num_heads) // mesh.tensor


def _in_flight(job: TrainingJob, mesh: Mesh, settings: Pretrain) -> float:
    """Micro-batches whose activations the first rank of a pipeline of p keeps, with v stages on
    each: gpipe all, 1F1B p, interleaved p (1 + (p - 1) / (p v)). Sources: Narayanan et al. 2021;
    Korthikanti et al. 2022, section 4.2.3; a V keeps as many as 1F1B (Qi et al. 2024)."""
    parallelism, all_of_step = job.spec.parallelism, num_micro_batches(settings, mesh)
    p, v = mesh.pipeline, parallelism.stages_per_rank
    if p == 1:
        return 1.0
    if parallelism.pipeline_schedule == "gpipe":
        return float(all_of_step)
    more = (p - 1) / v if parallelism.pipeline_schedule.startswith("interleaved") else 0.0
    return min(p + more, float(all_of_step))


def _largest_stage(mesh: Mesh) -> str:
    return "; P of the largest stage" if mesh.pipeline > 1 else ""


def _by(mesh: Mesh) -> str:
    """What the tensor axis divides."""
    return f" / {mesh.tensor} of the tensor axis" if mesh.tensor > 1 else ""


def _tiers(
    job: TrainingJob, mesh: Mesh, counts: Counts, host: HostMemory | None
) -> list[MemoryEstimate]:
    checkpoint, workers = job.spec.checkpoint, job.spec.workers_per_node
    buddy = needs_buddy(job, mesh) if host is None else host.grant.buddy
    buffers = BUDDY_BUFFERS if buddy else BUFFERS
    if host is not None:
        buffers = host.grant.buffers
    shards = mesh.shards_per_node(workers)
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    per, exact = checkpoint_bytes(recipe.config), recipe.config.optimizer.name == "adamw"
    unit, rows = shards * shard_bytes(recipe.config, mesh), []
    formula = f"{shards} shards x up to {buffers} buffers x {per:.4g} P / {mesh.num_shards}"
    if checkpoint.memory.every_steps == "auto" and buffers > 1:
        formula += f"; staged as often as {checkpoint.memory.budget_percent:g} % of a step allow"
    tier = checkpoint.memory.every_steps and buffers > 1
    what = "memory tier: staged checkpoints" if tier else "staged for storage"
    rows.append(MemoryEstimate(what, "node", buffers * unit, formula, exact=exact))
    if buddy:
        formula = f"{shards} shards x {COPIES} copies x {per:.4g} P / {mesh.num_shards}"
        what = "memory tier: copies for the buddy"
        rows.append(MemoryEstimate(what, "node", COPIES * unit, formula))
    size = math.ceil(per * counts.total)
    rows.append(MemoryEstimate("one checkpoint", "storage", size, f"{per:.4g} P", exact=exact))
    return rows


def plan_host(job: TrainingJob, mesh: Mesh, node: NodeFacts) -> HostMemory | None:
    """What a node like this one can hold of staged state; the agents plan in the same way, with
    what they measure. None: the model or the node's memory is not known."""
    if job.spec.entrypoint.recipe is None:
        return None
    workers, memory = job.spec.workers_per_node, job.spec.resources.memory
    limit = min([n for n in (node.memory_bytes, int(memory or 0) * workers) if n], default=0)
    on_cpu = not job.spec.resources.num_gpus
    if not limit or not (on_cpu or node.gpus):
        return None
    rows = memory_table(job, mesh)
    states = [r for r in rows if r.where == "node" and "model states" in r.what]
    used = workers * (PROCESS_BYTES + on_cpu * device_bytes(rows))
    used += sum(row.num_bytes for row in states)
    return plan_host_memory(
        HostRoom(limit, max(0, limit - used)),
        shard_bytes=shard_bytes(job.spec.entrypoint.recipe.config, mesh),
        num_shards=mesh.num_shards,
        workers=workers,
        buddy=needs_buddy(job, mesh),
        shards=mesh.shards_per_node(workers),
    )


def needs_buddy(job: TrainingJob, mesh: Mesh) -> bool:
    """Whether agents copy staged shards to another node, because no other node has them too."""
    memory = job.spec.checkpoint.memory
    if not memory.every_steps or mesh.world_size <= job.spec.workers_per_node:
        return False
    redundant = mesh.redundant(job.spec.workers_per_node)
    return memory.buddy == "always" or (memory.buddy == "auto" and not redundant)


# -- network traffic ----------------------------------------------------------------------------
class Traffic(msgspec.Struct, frozen=True):
    """One row: bytes that one rank sends per step within one kind of group."""

    what: str
    group: str
    num_bytes: int
    formula: str


def _tensor_traffic(job: TrainingJob, mesh: Mesh, settings: Pretrain, micro: int) -> Traffic:
    """Each block gathers its input twice and scatters its output twice, forward and backward; the
    embedding scatters, and the head gathers. Source: Korthikanti et al. 2022, section 4.2.2."""
    model, width = settings.model, parameter_bytes(job)
    tokens = settings.data.sequence_length // mesh.context * micro_batch(settings, mesh)
    boundary = width * tokens * model.dim
    again = _blocks_computed_twice(job.spec.parallelism.activation_checkpointing, model)
    collectives = (8 * model.num_layers + 4 * again) // mesh.pipeline + 4
    ring = (mesh.tensor - 1) / mesh.tensor
    formula = f"{collectives} x m {micro} x {width} sbh x (T-1)/T"
    group = f"tensor, {mesh.tensor} ranks"
    size = int(collectives * micro * boundary * ring)
    return Traffic("gathers and scatters of activations", group, size, formula)


def _blocks_computed_twice(settings: ActivationCheckpointing, model: Model) -> int:
    """Blocks whose forward is computed again in the backward pass."""
    again = settings.mode in ("full", "selective")
    return model.num_layers // settings.every_nth_block if again else 0


def _context_traffic(job: TrainingJob, mesh: Mesh, settings: Pretrain, micro: int) -> Traffic:
    """Each layer gathers keys and values forward and backward, and passes their fp32 gradients
    around the ring. Source: torch's _templated_ring_attention with its rotation by all-gather."""
    model, width = settings.model, parameter_bytes(job)
    tokens = settings.data.sequence_length // mesh.context * micro_batch(settings, mesh)
    checkpointing = job.spec.parallelism.activation_checkpointing
    gathers = 2 * model.num_layers
    if checkpointing.mode == "full" or "attention" not in checkpointing.keep:
        gathers += _blocks_computed_twice(checkpointing, model)
    others, ring = mesh.context - 1, 4 * mesh.context * model.num_layers
    each = tokens * _key_value_dim(model, mesh)
    formula = f"m {micro} x ({gathers} x {width} (C-1) + 4 C L) x {each:,}; C {mesh.context}"
    group = f"context, {mesh.context} ranks"
    size = micro * each * (gathers * width * others + ring)
    return Traffic("keys and values, and their gradients", group, size, formula)


def _pipeline_traffic(job: TrainingJob, mesh: Mesh, settings: Pretrain, micro: int) -> Traffic:
    """Each stage passes its activations on, and their gradients back."""
    width, stages = parameter_bytes(job), job.spec.parallelism.stages_per_rank
    boundary = settings.data.sequence_length * micro_batch(settings, mesh) * settings.model.dim
    formula = f"2 x {stages} stages x m {micro} x {width} sbh{_by(mesh)}"
    size = 2 * stages * micro * width * boundary // mesh.tensor
    group = f"pipeline, {mesh.pipeline} ranks"
    return Traffic("activations and their gradients", group, size, formula)


def traffic_table(job: TrainingJob, mesh: Mesh) -> tuple[Traffic, ...]:
    """All rows for a recipe; empty for scripts and modules, whose model is unknown.

    A ring collective over N ranks moves (N-1)/N of the bytes per rank for a gather or a
    reduce-scatter, and twice that for an all-reduce.
    """
    if job.spec.entrypoint.recipe is None:
        return ()
    settings = job.spec.entrypoint.recipe.config
    total = stage_parameters(count_parameters(settings.model), mesh) // mesh.tensor
    width = parameter_bytes(job)
    reduce = 4 if job.spec.parallelism.precision.reduce == "float32" else 2
    micro = num_micro_batches(settings, mesh)
    rows = []
    if mesh.tensor > 1:
        rows.append(_tensor_traffic(job, mesh, settings, micro))
    if mesh.context > 1:
        rows.append(_context_traffic(job, mesh, settings, micro))
    if mesh.pipeline > 1:
        rows.append(_pipeline_traffic(job, mesh, settings, micro))
        micro = 1  # gathered and reduced once in a step
    shard = mesh.num_fsdp_shards
    if shard > 1:
        keep = mesh.pipeline > 1 or job.spec.parallelism.reshard_after_forward is False
        gathers, whole = 1 if keep else 2, job.spec.parallelism.accumulate_gradients == "whole"
        gathered, reduced = 1 if keep and whole else micro, 1 if whole else micro
        ring = (shard - 1) / shard
        group = f"shard{' x context' * (mesh.context > 1)}, {shard} ranks"
        formula = f"{gathers} x m {gathered} x {width} P x (S-1)/S"
        size = int(gathers * gathered * width * total * ring)
        rows.append(Traffic("all-gather of parameters", group, size, formula))
        formula = f"m {reduced} x {reduce} P x (S-1)/S"
        size = int(reduced * reduce * total * ring)
        rows.append(Traffic("reduce-scatter of gradients", group, size, formula))
    if mesh.replicate > 1:
        ring = (mesh.replicate - 1) / mesh.replicate
        formula = f"2 x {reduce} P / S x (R-1)/R; S {shard}, R {mesh.replicate}"
        size = int(2 * reduce * total / shard * ring)
        group = f"replicate, {mesh.replicate} ranks"
        rows.append(Traffic("all-reduce of gradients", group, size, formula))
    return tuple(rows)
