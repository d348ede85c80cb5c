"""The plan of a model on devices, without a job: which strategies fit, which one trains fastest or
cheapest, and why the others lost."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from ..api.v1alpha1.parallelism import ActivationCheckpointing
from ..catalogue.types import Architecture, Device
from ..protocol.mesh import Mesh
from .estimate import Estimate, estimate
from .memory import USABLE, describe_host, host_share, state_bytes
from .search import Candidate, Cluster, Found, min_devices, search
from .workload import ParallelLayout, Workload

Order = Literal["tokens", "price"]


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout of one strategy on one kind of devices."""

    strategy: str
    mesh: Mesh
    devices: int
    device: str
    micro_batch: int
    num_micro_batches: int
    settings: dict[str, Any]
    """Fields of spec.parallelism beside the axes, and the recipe's loss, where not the default."""
    peak_bytes: int
    tokens_per_s: float | None = None
    """None: it does not fit."""
    mfu: float | None = None
    dollars_per_billion_tokens: float | None = None
    why: str = ""
    """Why it lost; empty for the one that is chosen."""


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `holdfast plan --model M --devices D`."""

    model: str
    parameters: int
    clusters: tuple[str, ...]
    network: str
    sequence_length: int
    global_batch: int
    fits: bool
    verdict: str
    """One line."""
    offload_memory: str
    """The main memory that offloaded states of a device may take; empty: the best layout offloads
    nothing."""
    chosen: Alternative | None
    estimate: Estimate | None
    """Of the chosen one."""
    device_memory_bytes: int | None
    alternatives: tuple[Alternative, ...]
    """That fit, best first, the chosen one among them."""
    lost: tuple[Alternative, ...]
    """Strategies that do not fit."""
    num_considered: int
    spec: dict[str, Any] | None = None
    """A TrainingJob that launches the chosen one; None: the recipe does not have this model."""


class _Ranked(NamedTuple):
    candidate: Candidate
    cluster: Cluster

    @property
    def price(self) -> float | None:
        """Dollars per billion tokens."""
        price = self.cluster.hardware.device.price
        if price is None:
            return None
        per_second = price.per_hour * self.cluster.devices / 3600
        return per_second / self.candidate.tokens_per_s * 1e9


def plan_model(work: Workload, clusters: tuple[Cluster, ...], order: Order) -> ModelPlan:
    """Ranks the strategies of all clusters. Raises ValueError for an order by price of devices
    without one."""
    found = [(cluster, search(work, cluster)) for cluster in clusters]
    ranked = [_Ranked(one, cluster) for cluster, answer in found for one in answer.ranked]
    ranked.sort(key=lambda one: _rank(one, order))
    alternatives = tuple(
        _alternative(one, "" if number == 0 else _why_lost(one, ranked[0], order))
        for number, one in enumerate(ranked)
    )
    best = ranked[0] if ranked else None
    hardware = best.cluster.hardware if best else clusters[0].hardware
    return ModelPlan(
        model=work.model.name,
        parameters=work.counts.total,
        clusters=tuple(f"{one.devices} x {one.hardware.device.name}" for one in clusters),
        network=clusters[0].hardware.network.name,
        sequence_length=work.sequence_length,
        global_batch=work.global_batch,
        fits=best is not None,
        verdict=_verdict(work, best, found),
        offload_memory=describe_host(best.cluster.host_bytes)
        if best and best.candidate.layout.offload
        else "",
        chosen=alternatives[0] if alternatives else None,
        estimate=estimate(work, best.candidate.layout, hardware) if best else None,
        device_memory_bytes=best.cluster.memory_bytes if best else clusters[0].memory_bytes,
        alternatives=alternatives,
        lost=_lost(found),
        num_considered=sum(answer.num_considered for _, answer in found),
        spec=spec_of(work, best.candidate.layout) if best else None,
    )


def _rank(one: _Ranked, order: Order) -> float:
    if order == "tokens":
        return -one.candidate.worth
    if one.price is None:
        raise ValueError(f"{one.cluster.hardware.device.name} has no price")
    return one.price * one.candidate.tokens_per_s / one.candidate.worth


def _alternative(one: _Ranked, why: str) -> Alternative:
    candidate, layout = one.candidate, one.candidate.layout
    return Alternative(
        strategy=candidate.strategy,
        mesh=layout.mesh,
        devices=one.cluster.devices,
        device=one.cluster.hardware.device.name,
        micro_batch=layout.micro_batch,
        num_micro_batches=layout.num_micro_batches,
        settings=settings_of(layout),
        peak_bytes=candidate.num_bytes,
        tokens_per_s=candidate.tokens_per_s,
        mfu=candidate.mfu,
        dollars_per_billion_tokens=one.price,
        why=why,
    )


def _why_lost(one: _Ranked, best: _Ranked, order: Order) -> str:
    """What of its step takes longer than that of the best."""
    if order == "price" and one.price is not None and best.price is not None:
        text = f"{one.price / best.price - 1:.0%} dearer per token"
    else:
        less = 1 - one.candidate.tokens_per_s / best.candidate.tokens_per_s
        text = f"{less:.0%} slower" if less > 0.005 else "no faster"
    mine = {part.what: part.seconds for part in one.candidate.time.parts}
    theirs = {part.what: part.seconds for part in best.candidate.time.parts}
    more = {what: seconds - theirs.get(what, 0.0) for what, seconds in mine.items()}
    what, seconds = max(more.items(), key=lambda pair: pair[1])
    if seconds > 0.005 * best.candidate.time.seconds:
        text += f": {what} +{seconds:.2g} s a step"
    elif text == "no faster":
        text += ": an axis more must gain 3 %, estimates are not better than that"
    return text


def _lost(found: list[tuple[Cluster, Found]]) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(
            strategy=one.strategy,
            mesh=one.layout.mesh,
            devices=cluster.devices,
            device=cluster.hardware.device.name,
            micro_batch=one.layout.micro_batch,
            num_micro_batches=one.layout.num_micro_batches,
            settings=settings_of(one.layout),
            peak_bytes=one.num_bytes,
            why=one.why,
        )
        for cluster, answer in found
        for one in answer.lost
    )


def _verdict(work: Workload, best: _Ranked | None, found: list[tuple[Cluster, Found]]) -> str:
    name, billions = work.model.name, work.counts.total / 1e9
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
    cluster = found[0][0]
    total = state_bytes(work) * work.counts.total
    text = (
        f"does not fit: {name} ({billions:.1f} B) on {cluster.devices} x "
        f"{cluster.hardware.device.name}: its states take {total / 2**30:,.0f} GiB, "
        f"{USABLE:.0%} of the devices' memory are "
        f"{USABLE * cluster.devices * cluster.memory_bytes / 2**30:,.0f}"
    )
    fewest = min_devices(work, cluster)
    if fewest is not None:
        text += f"; the fewest on which it fits: {fewest}"
    return text


# -- the job that launches it -------------------------------------------------------------------
def settings_of(layout: ParallelLayout) -> dict[str, Any]:
    """All that differs from the defaults beside axes and batch: fields of spec.parallelism, and the
    recipe's loss."""
    settings = parallelism_of(layout)
    if layout.chunk_tokens:
        settings["loss"] = {"chunkTokens": layout.chunk_tokens}
    return settings


def parallelism_of(layout: ParallelLayout) -> dict[str, Any]:
    """Fields of spec.parallelism beside the axes that differ from their defaults."""
    settings: dict[str, Any] = {}
    if layout.reshard is not True:
        settings["reshardAfterForward"] = layout.reshard
    checkpointing = layout.checkpointing
    if checkpointing != ActivationCheckpointing():
        settings["activationCheckpointing"] = {"mode": checkpointing.mode}
        if checkpointing.mode == "selective" and len(checkpointing.keep) == 1:
            settings["activationCheckpointing"]["keep"] = list(checkpointing.keep)
    if layout.offload:
        settings["offload"] = "cpu"
    if layout.mesh.pipeline > 1 and layout.schedule != "1f1b":
        settings["pipelineSchedule"] = layout.schedule
    return settings


def spec_of(work: Workload, layout: ParallelLayout) -> dict[str, Any] | None:
    """A TrainingJob with the recipe; None: the recipe does not have this architecture."""
    model = work.model
    if not _recipe_has(model):
        return None
    mesh, workers = layout.mesh, min(layout.workers_per_node, layout.mesh.world_size)
    axes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    axes |= {"context": mesh.context, "pipeline": mesh.pipeline}
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
            },
        },
    }


def _recipe_has(model: Architecture) -> bool:
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
