"""The plan of a model on devices, without a job: which strategies fit, which one trains fastest or
cheapest, and why the others lost."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from ..catalogue.types import Device
from ..planner import adapters
from ..planner.memory import USABLE, describe_host, device_bytes, host_share, state_bytes
from ..planner.model import Architecture
from ..planner.workload import ParallelLayout, Workload
from .estimate import Estimate, estimate
from .ranking import Alternative, Ranked, alternatives_of, best_first, lost_of, parallelism_of
from .search import Cluster, Found, min_batch, search


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `holdfast spec plan --model M --devices D`."""

    model: str
    parameters: int
    clusters: tuple[str, ...]
    network: str
    sequence_length: int
    global_batch: int
    format: str
    """Number format of the first layout's products."""
    method: str = "full"
    """full, lora or qlora."""
    trained: int
    """Parameters with gradients."""
    merged_bytes: int
    """Size of the exported model."""
    fits: bool
    verdict: str
    """One line."""
    offload_memory: str
    """The main memory that offloaded states of a device may take; empty: the best layout offloads
    nothing."""
    chosen: Alternative | None
    estimate: Estimate | None
    """Estimate of the chosen one."""
    device_memory_bytes: int | None
    alternatives: tuple[Alternative, ...]
    """Alternatives that fit, best first, the chosen one among them."""
    lost: tuple[Alternative, ...]
    """Strategies that do not fit."""
    num_considered: int
    own_loop_bytes: int | None = None
    """Peak of the chosen one in a script that wraps the blocks and the whole model with
    fully_shard."""
    spec: dict[str, Any] | None = None
    """A TrainingJob that launches the chosen one; None: the recipe does not have this model."""


def plan_model(work: Workload, clusters: tuple[Cluster, ...]) -> ModelPlan:
    """Ranks the strategies of all clusters."""
    works = [in_format_of(work, cluster.hardware.device) for cluster in clusters]
    pairs = zip(works, clusters, strict=True)
    runs = [(cluster, search(each, cluster)) for each, cluster in pairs]
    seen = (Ranked(c, cluster) for cluster, answer in runs for c in answer.ranked)
    ranked = best_first(seen)
    alternatives = alternatives_of(ranked)
    best = ranked[0] if ranked else None
    layout = best.candidate.layout if best else None
    cluster = best.cluster if best else clusters[0]
    work, hardware = in_format_of(work, cluster.hardware.device), cluster.hardware
    return ModelPlan(
        model=work.model.name,
        parameters=work.counts.total,
        clusters=tuple(f"{pool.devices} x {pool.hardware.device.name}" for pool in clusters),
        network=clusters[0].hardware.network.name,
        sequence_length=work.sequence_length,
        global_batch=work.global_batch,
        fits=best is not None,
        verdict=_verdict(work, best, runs),
        offload_memory=describe_host(cluster.host_bytes) if layout and layout.offload else "",
        chosen=alternatives[0] if alternatives else None,
        estimate=estimate(work, layout, hardware) if layout else None,
        device_memory_bytes=cluster.memory_bytes,
        format=work.format,
        method=work.method,
        trained=adapters.trained(work),
        merged_bytes=adapters.merged_bytes(work),
        alternatives=alternatives,
        lost=lost_of(runs),
        num_considered=sum(answer.num_considered for _, answer in runs),
        own_loop_bytes=device_bytes(replace(work, own_loop=True), layout)
        if layout and work.method == "full"
        else None,
        spec=spec_of(work, layout) if layout else None,
    )


def in_format_of(work: Workload, device: Device) -> Workload:
    """Plan in float16, whose loss is scaled, on a device without bfloat16."""
    lacks = work.format == "bfloat16" and "bfloat16" not in device.flops
    return replace(work, format="float16") if lacks else work


def _verdict(work: Workload, best: Ranked | None, found: list[tuple[Cluster, Found]]) -> str:
    name, billions = work.model.name, work.counts.total / 1e9
    if work.method != "full":
        name = f"{adapters.NAMES[work.method]} of {name}"
    if best is not None:
        candidate, cluster = best.candidate, best.cluster
        share = candidate.num_bytes / cluster.memory_bytes
        return (
            f"fits: {name} ({billions:.1f} B) on {cluster.devices} x "
            f"{cluster.hardware.device.name} with {candidate.strategy} "
            f"({candidate.layout.mesh.describe()}): {candidate.num_bytes / 2**30:.1f} of "
            f"{cluster.memory_bytes / 2**30:.1f} GiB ({share:.0%}), "
            f"{candidate.tokens_per_s:,.0f} tokens/s, MFU {candidate.mfu:.0%}"
        )
    cluster, answer = found[0]
    total, room = state_bytes(work) * work.counts.total, USABLE * cluster.memory_bytes
    text = f"does not fit: {name} ({billions:.1f} B) on {cluster.devices} x "
    text += f"{cluster.hardware.device.name}: "
    if not answer.num_considered:
        least = min_batch(work, cluster)
        text += f"its batch of {work.global_batch:,} is too small for these devices, which need "
        text += f"at least {least:,} samples in a step"
    elif total > cluster.devices * room:
        text += f"its states take {total / 2**30:,.0f} GiB, "
        text += f"{USABLE:.0%} of the devices' memory are "
        text += f"{cluster.devices * room / 2**30:,.0f}"
    else:
        lost = min(answer.lost, key=lambda one: device_bytes(work, one.layout))
        text += _least(work, lost.layout, room)
    return text


def _least(work: Workload, layout: ParallelLayout, room: float) -> str:
    """Memory of the layout that needs least, and its largest part."""
    figures = estimate(work, layout)
    parts = figures.categories()
    what = max(parts, key=lambda name: parts[name])
    return (
        f"{layout.mesh.strategy} ({layout.mesh.describe()}) needs least memory, "
        f"{figures.peak_bytes / 2**30:,.1f} GiB on each device, {parts[what] / 2**30:,.1f} of it "
        f"{what}; {USABLE:.0%} of a device's memory are {room / 2**30:.1f}"
    )


# -- the job that launches it -------------------------------------------------------------------
def spec_of(work: Workload, layout: ParallelLayout) -> dict[str, Any] | None:
    """A TrainingJob with the recipe; None: the recipe lacks this architecture or method."""
    model = work.model
    if work.method != "full" or not recipe_has(model):
        return None
    mesh, workers = layout.mesh, min(layout.workers_per_node, layout.mesh.world_size)
    axes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    axes["context"] = mesh.context
    nodes = mesh.world_size // workers
    config: dict[str, Any] = {
        "globalBatch": work.global_batch,
        "microBatch": layout.micro_batch,
        "compile": work.compiled,
        "model": {
            "vocabSize": model.vocab_size,
            "dim": model.dim,
            "numLayers": model.num_layers,
            "numHeads": model.num_heads,
            "numKvHeads": model.num_kv_heads,
            "ffnDim": model.ffn_dim,
            "qkNorm": model.qk_norm,
        },
        "data": {"sequenceLength": work.sequence_length},
    }
    if layout.chunk_tokens:
        config["loss"] = {"chunkTokens": layout.chunk_tokens}
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": model.name.lower().replace(".", "-").replace("_", "-")},
        "spec": {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
            "nodes": {"min": nodes, "max": nodes},
            "workersPerNode": workers,
            "resources": {"gpu": 1},
            "parallelism": {
                **{name: size for name, size in axes.items() if size > 1 or name == "shard"},
                **parallelism_of(layout),
                **({"precision": {"parameters": work.format}} if work.format != "bfloat16" else {}),
            },
        },
    }


def recipe_has(model: Architecture) -> bool:
    """True if the recipe can train it; others need a loop of their own."""
    plain = not (model.biases or model.qkv_bias or model.layer_norm or model.learned_positions)
    untied = not model.tied_embeddings
    return plain and untied and model.gated_ffn and model.num_heads * model.head_dim == model.dim


def cluster_of(
    devices: int, device: Device, hardware: Any, node_bytes: int | None = None
) -> Cluster:
    """Devices in nodes of the usual size, or in one smaller node. `node_bytes`: main memory of a
    node; None: not known."""
    per_node = min(devices, device.per_node)
    host = None if node_bytes is None else host_share(node_bytes, per_node)
    return Cluster(devices, per_node, hardware, device.memory_bytes, host)
