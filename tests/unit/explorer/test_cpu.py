"""A worker's share of a machine's processors as a device."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.catalogue.load import load_catalogue
from holdfast.orchestrator.explorer.cpu import EFFICIENCY, cpu_device, per_cycle
from holdfast.orchestrator.explorer.step_time import Hardware, peak_flops, step_time
from holdfast.orchestrator.protocol.facts import Processor
from holdfast.orchestrator.protocol.mesh import Mesh

from ..planner.builders import make_job, planned

GIB = 2**30


def test_workers_share_the_cores_the_memory_and_its_bandwidth() -> None:
    whole, half = cpu_device(8, 64 * GIB, 1), cpu_device(8, 64 * GIB, 2)
    assert half.flops["float32"] * 2 == whole.flops["float32"]
    assert half.memory_bytes * 2 == whole.memory_bytes == 64 * GIB
    assert 2 * half.memory_bandwidth == pytest.approx(whole.memory_bandwidth)
    assert (whole.per_node, half.per_node) == (1, 2)
    assert whole.link == half.link == "loopback"


def test_a_core_with_avx2_has_two_units_of_eight_lanes_at_the_nominal_clock() -> None:
    assert cpu_device(1, GIB, 1).flops["float32"] == 2 * 2 * 8 * 2.5e9


@pytest.mark.parametrize(("cpus", "workers", "cores"), [(7, 2, 3), (2, 4, 0.5), (0, 1, 1)])
def test_a_worker_has_whole_threads_or_a_part_of_a_core(
    cpus: int, workers: int, cores: float
) -> None:
    each = cpu_device(1, GIB, 1).flops["float32"]
    assert cpu_device(cpus, GIB, workers).flops["float32"] == pytest.approx(cores * each)


def test_bandwidth_of_many_cores_is_that_of_the_channels() -> None:
    some, all_of_them = cpu_device(4, GIB, 1), cpu_device(64, GIB, 1)
    assert all_of_them.memory_bandwidth < 16 * some.memory_bandwidth
    divided = cpu_device(64, GIB, 4)
    assert 4 * divided.memory_bandwidth == pytest.approx(all_of_them.memory_bandwidth)


@pytest.mark.parametrize(
    ("flags", "float32", "bfloat16_is_faster"),
    [(("sse2",), 16, False), (("avx2", "fma"), 32, False),
     (("avx2", "fma", "avx512f"), 64, False),
     (("avx2", "fma", "avx512f", "avx512_bf16"), 64, True),
     (("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"), 64, True)],
)  # fmt: skip
def test_the_instructions_decide_what_a_cycle_computes(
    flags: tuple[str, ...], float32: float, bfloat16_is_faster: bool
) -> None:
    found = per_cycle(flags)
    assert found["float32"] == float32
    assert (found["bfloat16"] > found["float32"]) is bfloat16_is_faster


def test_the_name_has_the_processor_and_the_cores_of_a_measurement() -> None:
    one = cpu_device(2, GIB, 2, Processor("Some CPU"))
    two = cpu_device(2, GIB, 1, Processor("Some CPU"))
    assert (one.name, two.name) == ("Some CPU, 1 core", "Some CPU, 2 cores")


@pytest.mark.parametrize("format_", ["float32", "bfloat16"])
def test_a_job_is_timed_on_the_peak_of_its_format(format_: str) -> None:
    precision = {"precision": {"parameters": format_}}
    job = make_job(recipe={}, resources={"gpu": 0}, parallelism=precision)
    work, _layout = planned(job, Mesh(shard=2))
    device = cpu_device(2, GIB, 2)
    assert peak_flops(work, device) == device.flops[format_]


def test_communication_of_gloo_takes_the_cores_so_none_of_it_is_hidden() -> None:
    job = make_job(recipe={}, nodes=(1, 1), resources={"gpu": 0})
    link = load_catalogue().link("loopback")
    hardware = Hardware(cpu_device(2, GIB, 2), link, link, efficiency=EFFICIENCY)
    work, layout = planned(job, Mesh(shard=2))
    time = step_time(work, layout, hardware)
    slower = [part.seconds for part in time.parts if part.what == "slowed by communication"]
    assert slower == [pytest.approx(time.hidden)]
