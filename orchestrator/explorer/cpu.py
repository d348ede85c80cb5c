"""A worker's share of a machine's processors as a device, for jobs that train on CPUs.

The figures are nominal, of one core of a server at CLOCK. What a core reaches differs by a factor
of two between machines, and with what else runs on them; `spec plan --calibrate` measures it.
"""

from __future__ import annotations

from collections.abc import Collection

from ..catalogue.types import Device
from ..protocol.facts import Processor
from .step_time import Efficiency

CLOCK = 2.5e9
"""Cycles/s with all cores at work: the base clocks of servers are between 2.0 and 3.0 GHz (AMD EPYC
7003: 2.45 GHz for 64 cores; Intel Xeon 8380: 2.3 GHz)."""
CORE_BANDWIDTH = 20e9
"""Bytes/s that one core reads and writes of main memory, which its outstanding cache misses limit:
adding a number to an array measured 15 GB/s on an EPYC 7003, or 22 with the lines that each write
fetches first."""
MACHINE_BANDWIDTH = 160e9
"""Bytes/s of all cores: eight channels of DDR4-3200 are 205 GB/s, of which STREAM reaches 80 %."""
LINK = "loopback"

EFFICIENCY = Efficiency(
    matmul=0.75,
    float8=0.75,
    attention=0.30,
    memory=0.80,
    # Gloo's threads run on the cores that compute, so nothing is hidden.
    overlap=2.0,
)
"""Shares of these peaks that torch reaches with one thread for each core."""


def cpu_device(
    cpus: int, memory_bytes: int, workers: int, processor: Processor | None = None
) -> Device:
    """The share of one of `workers` workers of a machine with so many cores and bytes of memory.

    A worker has at least one thread, so with more workers than cores each has a part of a core.
    """
    processor = processor or Processor()
    cores = max(1, cpus) / workers
    threads = max(1.0, float(max(1, cpus) // workers))
    used = min(cores, threads)
    return Device(
        name=f"{processor.name}, {used:.3g} core{'s' * (used > 1)}",
        memory_bytes=memory_bytes // workers,
        flops={name: cycle * CLOCK * used for name, cycle in per_cycle(processor.flags).items()},
        memory_bandwidth=min(CORE_BANDWIDTH * used, MACHINE_BANDWIDTH / workers),
        link=LINK,
        per_node=workers,
        host_bandwidth=CORE_BANDWIDTH * used,
        source="nominal figures of a server core at 2.5 GHz; calibrate them",
    )


def per_cycle(flags: Collection[str]) -> dict[str, float]:
    """FLOPs that a core computes in a cycle by format: two units of fused multiply-add, each with
    as many lanes as a register has numbers. Sources: Intel 64 and IA-32 optimization manual (units
    and AMX: 1024 products of bfloat16 in a cycle); AMD, software optimization guide for Zen 3."""
    lanes = 16 if "avx512f" in flags else 8 if {"avx2", "fma"} <= set(flags) else 4
    float32 = 2.0 * 2 * lanes
    # Without instructions for bfloat16 torch computes its products one by one: 1.2 GFLOP/s were
    # measured on a core with AVX2 (torch 2.15).
    bfloat16 = 0.5
    if "avx512_bf16" in flags:
        bfloat16 = 2 * float32
    if "amx_bf16" in flags:
        bfloat16 = 2048.0
    return {"float32": float32, "bfloat16": bfloat16}
