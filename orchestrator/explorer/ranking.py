"""Layouts in order of tokens/s, and in a few words why each lost to the first: of a model
without a job, and of the recipe of a job on the same devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..api.v1alpha1.parallelism import ActivationCheckpointing
from ..planner.workload import ParallelLayout
from ..protocol.mesh import Mesh
from .search import Candidate, Cluster, Found


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
    """Reason why the strategy lost; empty for the chosen one."""


class Ranked(NamedTuple):
    """A layout that fits, and where."""

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


def best_first(every: Iterable[Ranked]) -> list[Ranked]:
    return sorted(every, key=lambda one: -one.candidate.worth)


def alternatives_of(ranked: Sequence[Ranked]) -> tuple[Alternative, ...]:
    """The same in the same order, with what each lost by."""
    return tuple(
        _alternative(
            candidate.candidate.strategy,
            candidate.candidate.layout,
            candidate.cluster,
            candidate.candidate.num_bytes,
            "" if number == 0 else _why_lost(candidate, ranked[0]),
            tokens_per_s=candidate.candidate.tokens_per_s,
            mfu=candidate.candidate.mfu,
            dollars_per_billion_tokens=candidate.price,
        )
        for number, candidate in enumerate(ranked)
    )


def _alternative(
    strategy: str, layout: ParallelLayout, cluster: Cluster, num_bytes: int, why: str, **more: Any
) -> Alternative:
    return Alternative(
        strategy=strategy,
        mesh=layout.mesh,
        devices=cluster.devices,
        device=cluster.hardware.device.name,
        micro_batch=layout.micro_batch,
        num_micro_batches=layout.num_micro_batches,
        settings=settings_of(layout),
        peak_bytes=num_bytes,
        why=why,
        **more,
    )


def _why_lost(one: Ranked, best: Ranked) -> str:
    """Part of its step that takes longer than the best one's."""
    less = 1 - one.candidate.tokens_per_s / best.candidate.tokens_per_s
    text = f"{less:.0%} slower" if less > 0.005 else "no faster"
    mine = {part.what: part.seconds for part in one.candidate.time.parts}
    theirs = {part.what: part.seconds for part in best.candidate.time.parts}
    more = {what: seconds - theirs.get(what, 0.0) for what, seconds in mine.items()}
    what, seconds = max(more.items(), key=lambda pair: pair[1])
    if seconds > 0.005 * best.candidate.time.seconds:
        written = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"
        text += f": {what} +{written} s a step"
    elif text == "no faster" and one.candidate.axes > best.candidate.axes:
        text += ": an axis more must gain 3 %, estimates are not better than that"
    elif text == "no faster":
        text += ": estimates do not tell them apart"
    return text


def lost_of(found: Iterable[tuple[Cluster, Found]]) -> tuple[Alternative, ...]:
    """The layout that needs least memory for each strategy that does not fit."""
    return tuple(
        _alternative(c.strategy, c.layout, cluster, c.num_bytes, c.why)
        for cluster, answer in found
        for c in answer.lost
    )


def settings_of(layout: ParallelLayout) -> dict[str, Any]:
    """All that differs from the defaults beside axes and batch: fields of spec.parallelism, and the
    recipe's loss."""
    settings = parallelism_of(layout)
    if layout.chunk_tokens:
        settings["loss"] = {"chunkTokens": layout.chunk_tokens}
    return settings


def parallelism_of(layout: ParallelLayout) -> dict[str, Any]:
    """Fields of spec.parallelism beside the other axes that differ from their defaults."""
    settings: dict[str, Any] = {}
    if layout.reshard is not True:
        settings["fsdp"] = {"reshardAfterForward": layout.reshard}
    checkpointing = layout.checkpointing
    if checkpointing != ActivationCheckpointing():
        written = checkpointing.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        settings["activationCheckpointing"] = written
    if layout.offload:
        settings["offload"] = "cpu"
    if layout.mesh.pipeline > 1:
        settings["pipeline"] = {"ranks": layout.mesh.pipeline}
        if layout.schedule != "1f1b":
            settings["pipeline"]["schedule"] = layout.schedule
    return settings
