"""All figures of one layout, as `holdfast spec plan` shows them and --json prints them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ..catalogue.calibration import Calibration
from ..catalogue.types import Price
from ..planner.memory import USABLE, device_terms, state_terms
from ..planner.model import flops_per_token
from ..planner.terms import PHASES, Term, by_phase
from ..planner.workload import ParallelLayout, Workload
from .step_time import Hardware, crosses_nodes, mfu, step_time, transfer
from .traffic import collectives


class MemoryRow(msgspec.Struct, frozen=True):
    """One contribution to the memory of a rank's device."""

    category: str
    what: str
    num_bytes: int
    phases: tuple[str, ...]
    """Phases of a step in which it is there."""
    formula: str
    source: str
    exact: bool


class TrafficRow(msgspec.Struct, frozen=True):
    """Traffic of one rank in a step within one kind of group."""

    what: str
    collective: str
    group: str
    num_bytes: int
    calls: int
    formula: str
    source: str
    link: str = ""
    """The slowest that it crosses; empty: the hardware is not known."""
    seconds: float | None = None
    """Seconds if nothing else used the link; None: the hardware is not known."""


class TimeRow(msgspec.Struct, frozen=True):
    """A share of the step of the slowest rank."""

    what: str
    seconds: float
    exposed: bool
    """Communication or waiting that compute does not hide."""
    formula: str
    source: str


class TimePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A step on known hardware."""

    seconds: float
    rows: tuple[TimeRow, ...]
    exposed_seconds: float
    hidden_seconds: float
    """Seconds of communication beside compute."""
    tokens_per_s: float
    mfu: float
    device: str
    dollars_per_day: float | None = None
    dollars_per_billion_tokens: float | None = None
    price: Price | None = None
    calibration: Calibration | None = None
    """Factors by which measurements differ from estimates; None: not measured."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one layout."""

    micro_batch: int
    num_micro_batches: int
    flops_per_step: float
    peak_bytes: int
    """Peak of one rank's device."""
    peak_phase: str
    phases: dict[str, int]
    memory: tuple[MemoryRow, ...]
    states_bytes: int
    """Part of these: master copy, gradients and moments, wherever they are."""
    traffic: tuple[TrafficRow, ...]
    time: TimePlan | None = None
    """None: the hardware is not known."""

    def categories(self) -> dict[str, int]:
        """Bytes by category in the phase of the peak."""
        sums: dict[str, int] = {}
        for row in self.memory:
            if self.peak_phase in row.phases:
                sums[row.category] = sums.get(row.category, 0) + row.num_bytes
        return sums


def estimate(work: Workload, layout: ParallelLayout, hardware: Hardware | None = None) -> Estimate:
    """All figures of one layout; times only with `hardware`."""
    terms = device_terms(work, layout)
    sums = by_phase(terms)
    most = max(range(len(sums)), key=lambda number: sums[number])
    flops = flops_per_token(work.model, work.sequence_length) * work.tokens_per_step
    return Estimate(
        micro_batch=layout.micro_batch,
        num_micro_batches=layout.num_micro_batches,
        flops_per_step=flops,
        peak_bytes=math.ceil(sums[most]),
        peak_phase=PHASES[most],
        phases={name: math.ceil(size) for name, size in zip(PHASES, sums, strict=True)},
        memory=tuple(_memory_rows(terms)),
        states_bytes=round(sum(term.num_bytes for term in state_terms(work, layout))),
        traffic=tuple(_traffic_rows(work, layout, hardware)),
        time=_time(work, layout, hardware) if hardware is not None else None,
    )


def _memory_rows(terms: Iterable[Term]) -> Iterable[MemoryRow]:
    for term in terms:
        phases = tuple(name for number, name in enumerate(PHASES) if term.phases >> number & 1)
        yield MemoryRow(
            term.category, term.what, round(term.num_bytes), phases, term.formula(), term.source,
            term.exact,
        )  # fmt: skip


def _traffic_rows(
    work: Workload, layout: ParallelLayout, hardware: Hardware | None
) -> Iterable[TrafficRow]:
    for row in collectives(work, layout):
        link, seconds = "", None
        if hardware is not None:
            away = crosses_nodes(row, layout)
            link = hardware.network.name if away else hardware.node_link.name
            seconds = transfer(row, layout, hardware)
        yield TrafficRow(
            row.what, row.kind, row.group, round(row.num_bytes), row.calls, row.formula(),
            row.source, link, seconds,
        )  # fmt: skip


def _time(work: Workload, layout: ParallelLayout, hardware: Hardware) -> TimePlan:
    time, price = step_time(work, layout, hardware), hardware.device.price
    tokens_per_s = work.tokens_per_step / time.seconds
    per_hour = price.per_hour * layout.mesh.world_size if price is not None else None
    return TimePlan(
        seconds=time.seconds,
        rows=tuple(
            TimeRow(part.what, part.seconds, part.exposed, part.formula(), part.source)
            for part in time.parts
        ),
        exposed_seconds=time.exposed,
        hidden_seconds=time.hidden,
        tokens_per_s=tokens_per_s,
        mfu=mfu(work, layout, hardware, time.seconds),
        device=hardware.device.name,
        dollars_per_day=per_hour and per_hour * 24,
        dollars_per_billion_tokens=per_hour and per_hour / 3600 / tokens_per_s * 1e9,
        price=price,
        calibration=hardware.calibration,
    )


def fits(num_bytes: float, memory_bytes: int) -> bool:
    """True if an estimate leaves the share of a device free that keeps it from running out."""
    return num_bytes <= USABLE * memory_bytes
