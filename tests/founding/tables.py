"""The documents' tables and scenarios, computed: what each needs, and what fits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from holdfast.orchestrator.explorer.ranking import Alternative
from holdfast.orchestrator.planner.memory import USABLE, model_state_bytes
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload

from .claims import ceiling
from .figures import CLAIMS, FLOAT32_BYTES, MIXED_BYTES, claimed, zero_gb, zero_layouts
from .models import (
    GB,
    LEAST,
    cluster,
    device,
    kept_gb,
    layout,
    nominal,
    peak_gb,
    planned,
    states_gb,
    work,
)

SIZES_BILLIONS = (7, 13, 70, 175)
ZERO_RANKS = (8, 16, 64)


class Zero(NamedTuple):
    """GB of states of one rank."""

    billions: int
    ranks: int
    paper: list[float]
    """DDP, ZeRO-1, 2, 3 with 2 + 2 + 12 bytes."""
    float32: list[float]
    """The same with 4 + 4 + 8 bytes."""
    own: list[float]
    """Memory of Holdfast's spelling: float32 shards, and bfloat16 copies where they stay whole."""


def zero_table() -> list[Zero]:
    rows = []
    for billions in SIZES_BILLIONS:
        for ranks in ZERO_RANKS:
            job, layouts = nominal(billions), zero_layouts(ranks)
            own = [states_gb(job, 1)]
            own += [kept_gb(job, one) for name, one in layouts.items() if name != "DDP"]
            rows.append(
                Zero(
                    billions,
                    ranks,
                    zero_gb(billions, ranks, MIXED_BYTES),
                    zero_gb(billions, ranks, FLOAT32_BYTES),
                    own,
                )
            )
    return rows


# -- the fewest devices -------------------------------------------------------------------------
class Fewest(NamedTuple):
    """A row of document A's table of GPUs, and what is right."""

    model: str
    kind: str
    document: str
    document_needs: float
    """GB of states of one device with as many as the document has."""
    have: float
    """GB of one device."""
    number: int
    """Fewest, in whole nodes above one node, on which FSDP fits without offload."""
    peak: float
    """GB of one device then."""
    host: float
    """GB of main memory that offload to it needs instead, for the job."""


MINIMA = (
    ("llama2-7b", "RTX-4090", 1),
    ("llama2-13b", "A100-40", 2),
    ("llama3-70b", "H100-80", 2),
    ("gpt3-175b", "H100-80", 8),
)


def sizes(per_node: int) -> list[int]:
    """Numbers of devices that fill whole nodes, or a part of one."""
    return [1, 2, 4, *(per_node * nodes for nodes in range(1, 65))]


def fewest_table() -> list[Fewest]:
    rows = []
    for name, kind, count in MINIMA:
        job, one = work(name, 2048), device(kind)
        have = one.memory_bytes / GB
        number, peak = fewest(job, have)
        rows.append(
            Fewest(
                name,
                kind,
                f"{count} x {kind}",
                model_state_bytes(job, layout(count)) / GB,
                have,
                number,
                peak,
                model_state_bytes(job, layout(1)) / GB,
            )
        )
    return rows


def fewest(job: Workload, have: float) -> tuple[int, float]:
    """(devices, GB of one) of the smallest FSDP that needs at most USABLE of a device, with all
    blocks computed again and the loss in chunks."""
    for number in sizes(8):
        peak = peak_gb(job, layout(number, **LEAST))
        if peak <= USABLE * have:
            return number, peak
    raise AssertionError("more than 64 nodes")


# -- the six scenarios --------------------------------------------------------------------------
class Scenario(NamedTuple):
    """One of document C's, with the strategy that it sets."""

    id: str
    model: str
    devices: str
    says: str
    layouts: tuple[ParallelLayout, ...]
    """Layouts of the document's strategy, largest memory last; none: it trains adapters only."""


SCENARIOS = (
    Scenario("R12", "llama2-7b", "4xA100-80", "DDP or NO_SHARD", (layout(1, 4, **LEAST),)),
    Scenario(
        "R13", "llama2-13b", "8xA100-80", "SHARD_GRAD_OP", (layout(8, reshard=False, **LEAST),)
    ),
    Scenario("R14", "llama3-70b", "8xH100-80", "FULL_SHARD", (layout(8, **LEAST),)),
    Scenario("R15", "llama3-70b", "64xH100-80", "HYBRID_SHARD, 8 x 8", (layout(8, 8, **LEAST),)),
    Scenario(
        "R16", "llama3-405b", "1024xH100-80", "FSDP, tensor and sequence parallel",
        (layout(128, tensor=8, **LEAST),),
    ),
    Scenario("R17", "llama2-7b", "1xA100-40", "LoRA or QLoRA, one device", (layout(1, **LEAST),)),
)  # fmt: skip


class Answer(NamedTuple):
    """The planner's answer to a scenario."""

    scenario: Scenario
    needs: float
    """GB of one device: the document's strategy with all that saves memory, but no offload."""
    have: float
    fits: bool
    """True if it fits in USABLE of a device."""
    best: Alternative | None
    """The planner's choice for full training; None: nothing fits."""
    without_offload: Alternative | None
    """The best that keeps all states on the devices."""


@cache
def answers() -> tuple[Answer, ...]:
    found = []
    for scenario in SCENARIOS:
        job, have = work(scenario.model), cluster(scenario.devices).memory_bytes / GB
        needs = max(peak_gb(job, one) for one in scenario.layouts)
        plan = planned(scenario.model, scenario.devices)
        kept = [one for one in plan.alternatives if "offload" not in one.settings]
        found.append(
            Answer(
                scenario,
                needs,
                have,
                needs <= USABLE * have,
                plan.chosen,
                kept[0] if kept else None,
            )
        )
    return tuple(found)


# -- claims of throughput -----------------------------------------------------------------------
class Claim(NamedTuple):
    """A claimed throughput, and the bound."""

    id: str
    model: str
    devices: str
    tokens: float
    ceiling: float


def claims() -> list[Claim]:
    rows = []
    for name in CLAIMS:
        job, number, kind, tokens = claimed(name)
        bound = ceiling(job, number, device(kind))
        rows.append(Claim(name, job.model.name, f"{number} x {kind}", tokens, bound))
    return rows
