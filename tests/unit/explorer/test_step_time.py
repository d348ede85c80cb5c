"""Time of a step: its parts, what hides and what does not, and what makes it faster or slower."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing
from holdfast.orchestrator.catalogue.calibration import Calibration
from holdfast.orchestrator.explorer.estimate import estimate
from holdfast.orchestrator.explorer.step_time import (
    EFFICIENCY,
    Hardware,
    StepTime,
    crosses_nodes,
    mfu,
    peak_flops,
    span,
    step_time,
    transfer,
)
from holdfast.orchestrator.explorer.traffic import Collective, collectives
from holdfast.orchestrator.planner.model import flops_per_token
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload
from holdfast.orchestrator.protocol.mesh import Mesh

from .clusters import hardware, workload

FULL = ActivationCheckpointing.model_validate({"full": {}})
MESHES = [
    Mesh(), Mesh(replicate=16), Mesh(shard=16), Mesh(replicate=2, shard=8), Mesh(shard=8, tensor=2),
    Mesh(shard=4, context=4), Mesh(shard=2, pipeline=8), Mesh(shard=2, tensor=2, pipeline=4),
]  # fmt: skip


def layout(mesh: Mesh, micro_batch: int = 1, passes: int = 8, **more: Any) -> ParallelLayout:
    sizes = {"workers_per_node": 8, "micro_batch": micro_batch, "num_micro_batches": passes}
    return ParallelLayout(mesh=mesh, **sizes, **more)


def work_of(one: ParallelLayout, **more: Any) -> Workload:
    samples = one.micro_batch * one.num_micro_batches * one.mesh.data_parallel_size
    return workload("llama3-8b", samples, **more)


def time_of(one: ParallelLayout, on: Hardware | None = None, **more: Any) -> StepTime:
    return step_time(work_of(one, **more), one, on or hardware())


def seconds(time: StepTime, what: str) -> float:
    return sum(part.seconds for part in time.parts if part.what == what)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.describe())
def test_the_parts_add_up(mesh: Mesh) -> None:
    time = time_of(layout(mesh))
    assert time.seconds == pytest.approx(sum(part.seconds for part in time.parts))
    assert all(part.seconds > 0 and part.formula() and part.source for part in time.parts)
    assert time.exposed == pytest.approx(sum(p.seconds for p in time.parts if p.exposed))
    assert 0 <= time.exposed < time.seconds
    assert len({part.what for part in time.parts}) == len(time.parts)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.describe())
def test_what_is_hidden_and_exposed_are_the_collectives_and_nothing_else(mesh: Mesh) -> None:
    one, on = layout(mesh), hardware()
    work, time = work_of(one), time_of(one)
    total = sum(transfer(row, one, on) for row in collectives(work, one))
    idle = seconds(time, "pipeline bubble")
    assert time.hidden + time.exposed - idle == pytest.approx(total)


@given(
    mesh=st.sampled_from(MESHES),
    passes=st.sampled_from([8, 16]),
    micro_batch=st.sampled_from([1, 4]),
    which=st.sampled_from(["network", "node_link", "memory", "flops"]),
    checkpointing=st.sampled_from([ActivationCheckpointing(), FULL]),
)
def test_twice_the_bandwidth_never_slows(
    mesh: Mesh, passes: int, micro_batch: int, which: str, checkpointing: ActivationCheckpointing
) -> None:
    one = layout(mesh, micro_batch, passes, checkpointing=checkpointing)
    slow = hardware()
    device, local, network = slow.device, slow.node_link, slow.network
    fast = {
        "network": slow._replace(network=replace(network, bandwidth=2 * network.bandwidth)),
        "node_link": slow._replace(node_link=replace(local, bandwidth=2 * local.bandwidth)),
        "memory": replace(device, memory_bandwidth=2 * device.memory_bandwidth),
        "flops": replace(device, flops={name: 2 * x for name, x in device.flops.items()}),
    }[which]
    fast = fast if isinstance(fast, Hardware) else slow._replace(device=fast)
    assert time_of(one, fast).seconds <= time_of(one, slow).seconds * (1 + 1e-9)


def test_communication_over_nodes_is_less_hidden_than_within_one() -> None:
    """The same group of 8 ranks, on one node and on eight."""
    within = layout(Mesh(shard=8), 1, 1)
    over = replace(within, workers_per_node=1)
    slow = hardware(network="ethernet-25")
    near, far = time_of(within, slow), time_of(over, slow)
    assert far.exposed > 10 * near.exposed
    assert far.seconds > near.seconds


def test_more_nodes_expose_more() -> None:
    """One sample a rank: compute stays the same and collectives get longer."""
    on = hardware(network="ethernet-100")
    times = [time_of(layout(Mesh(shard=ranks), 1, 1), on) for ranks in (8, 16, 64, 256)]
    exposed = [time.exposed for time in times]
    assert exposed == sorted(exposed)
    assert exposed[0] < exposed[-1]


def test_a_larger_micro_batch_hides_more() -> None:
    on = hardware(network="ethernet-100")
    small, large = (time_of(layout(Mesh(shard=64), size, 1), on) for size in (1, 8))
    assert large.exposed / large.seconds < small.exposed / small.seconds


@pytest.mark.parametrize(
    ("schedule", "stages", "idle"),
    [("gpipe", 1, 7), ("1f1b", 1, 7), ("interleaved1f1b", 2, 7 / 2), ("interleaved1f1b", 4, 7 / 4),
     ("interleavedZeroBubble", 2, 7 / 2 / 3), ("zbvZeroBubble", 2, 0)],
)  # fmt: skip
def test_the_bubble_of_a_schedule(schedule: str, stages: int, idle: float) -> None:
    """(p - 1) / m of the other time, divided by the stages of a rank (Narayanan et al. 2021)."""
    one = layout(Mesh(pipeline=8), 1, 16, schedule=schedule, stages_per_rank=stages)
    time = time_of(one)
    names = ("matrix products", "attention", "passes over memory", "recomputation", "head and loss")
    others = sum(seconds(time, name) for name in (*names, "between stages"))
    assert seconds(time, "pipeline bubble") == pytest.approx(idle / 16 * others)


def test_a_calibration_scales_compute_and_leaves_communication() -> None:
    one, on = layout(Mesh(shard=8, tensor=2), 2, 4), hardware()
    plain = time_of(one, on)
    measured = on._replace(calibration=Calibration(block=2.0, head=3.0, optimizer=1.5))
    scaled = time_of(one, measured)
    for what, factor in (
        ("matrix products", 2),
        ("attention", 2),
        ("passes over memory", 2),
        ("head and loss", 3),
        ("optimizer", 1.5),
        ("tensor and context axes", 1),
    ):
        assert seconds(scaled, what) == pytest.approx(factor * seconds(plain, what)), what


def test_offload_is_slower_and_takes_less_of_the_device() -> None:
    one = layout(Mesh(shard=8), 1, 4)
    away = replace(one, offload=True)
    assert time_of(away).seconds > time_of(one).seconds
    assert seconds(time_of(away), "optimizer") > seconds(time_of(one), "optimizer")
    work = work_of(one)
    assert estimate(work, away).peak_bytes < estimate(work, one).peak_bytes


def test_what_is_computed_again_takes_time() -> None:
    kept = ActivationCheckpointing.model_validate({"selective": {}})
    attention = ActivationCheckpointing.model_validate({"selective": {"keep": ["attention"]}})
    half = ActivationCheckpointing.model_validate({"full": {"everyNthBlock": 2}})
    times = [
        seconds(time_of(layout(Mesh(), checkpointing=one)), "recomputation")
        for one in (ActivationCheckpointing(), kept, attention, FULL)
    ]
    assert times[0] == 0
    assert times == sorted(times)
    assert len(set(times)) == 4
    again = seconds(time_of(layout(Mesh(), checkpointing=half)), "recomputation")
    assert again == pytest.approx(times[3] / 2)
    # Full: the forward of all blocks once more, a third of their products.
    full = time_of(layout(Mesh(), checkpointing=FULL))
    forward = seconds(full, "matrix products") / 3 + seconds(full, "attention") / 3.5
    forward += seconds(full, "passes over memory") / 3
    assert times[3] == pytest.approx(forward)


def test_compiled_blocks_and_float8_are_faster() -> None:
    one = layout(Mesh(shard=8))
    eager = time_of(one, compiled=False).seconds
    compiled = time_of(one).seconds
    float8 = time_of(one, float8=True).seconds
    assert eager > compiled > float8
    # A device without float8 computes the products in bfloat16.
    old = hardware("A100-80")
    assert time_of(one, old, float8=True).seconds == time_of(one, old).seconds


def test_products_take_what_their_flops_take() -> None:
    """Computed by hand: 2 FLOPs for each parameter of a matrix and token, three times."""
    one, on = layout(Mesh(), 2, 3), hardware()
    work = work_of(one)
    tokens = 2 * 3 * work.sequence_length
    flops = 6 * work.counts.matrices * work.model.num_layers * tokens
    expected = flops / (989e12 * EFFICIENCY.matmul)
    assert seconds(step_time(work, one, on), "matrix products") == pytest.approx(expected)


def test_mfu_is_of_the_whole_peak_and_not_of_what_a_power_limit_leaves() -> None:
    one, on = layout(Mesh(shard=8)), hardware()
    work = work_of(one)
    limited = on._replace(device=replace(on.device, sustained=0.8))
    for each in (on, limited):
        time = step_time(work, one, each).seconds
        flops = flops_per_token(work.model, work.sequence_length) * work.tokens_per_step
        assert mfu(work, one, each, time) == pytest.approx(flops / time / 8 / 989e12)
    slower = seconds(step_time(work, one, limited), "matrix products")
    assert slower == pytest.approx(seconds(step_time(work, one, on), "matrix products") / 0.8)


def test_a_device_without_bfloat16_computes_it_at_its_peak_of_float32() -> None:
    work = workload("llama3-8b")
    volta = hardware("V100-32").device
    assert "bfloat16" not in volta.flops
    assert peak_flops(work, volta) == volta.flops["float32"]
    assert peak_flops(replace(work, format="float16"), volta) == volta.flops["float16"]
    assert peak_flops(replace(work, format="float32"), volta) == volta.flops["float32"]


# -- one collective -----------------------------------------------------------------------------
def _ring(axes: tuple[str, ...], ranks: int, kind: Any = "all-gather") -> Collective:
    return Collective("x", kind, axes, ranks, 46e9, 1, lambda: "", "")


def test_a_ring_within_a_node_has_the_bandwidth_of_its_link() -> None:
    on = hardware()
    found = transfer(_ring(("shard",), 8), layout(Mesh(shard=8)), on)
    assert found == pytest.approx(46e9 / 350e9 + 7 * 3e-6)


@pytest.mark.parametrize(
    ("network", "whole", "alone"),
    [
        # 8 ports of 46 GB/s are 368, so NVLink's 350 limit; 14 steps within nodes and one between.
        # Behind a tensor axis of 8 each ring has one rank on a node, and one port.
        ("", 46e9 / 350e9 + 14 * 3e-6 + 8e-6, 46e9 / 46e9 + 3 * 8e-6),
        # One port, which the 8 rings of a node share.
        ("ethernet-100", 46e9 / 10e9 + 14 * 3e-6 + 25e-6, 8 * 46e9 / 10e9 + 3 * 25e-6),
    ],
)
def test_a_ring_over_nodes_uses_a_port_for_each_of_its_ranks_on_a_node(
    network: str, whole: float, alone: float
) -> None:
    on = hardware(network=network) if network else hardware()
    assert transfer(_ring(("shard",), 16), layout(Mesh(shard=16)), on) == pytest.approx(whole)
    behind = layout(Mesh(shard=4, tensor=8))
    assert transfer(_ring(("shard",), 4), behind, on) == pytest.approx(alone)


@pytest.mark.parametrize(
    ("tensor", "workers", "crosses"), [(2, 4, False), (4, 2, True), (2, 3, True), (4, 6, True)]
)
def test_a_tensor_axis_that_does_not_divide_a_node_waits_for_the_network(
    tensor: int, workers: int, crosses: bool
) -> None:
    row = _ring(("tensor",), tensor)
    on_nodes = replace(layout(Mesh(tensor=tensor, replicate=6)), workers_per_node=workers)
    assert crosses_nodes(row, on_nodes) is crosses
    within = transfer(row, layout(Mesh(tensor=tensor, replicate=6)), hardware())
    assert (transfer(row, on_nodes, hardware()) > within) is crosses


def test_a_send_has_the_latency_of_one_step_and_an_all_reduce_of_two_rings() -> None:
    on = hardware()
    send = transfer(_ring(("pipeline",), 4, "send"), layout(Mesh(shard=8, pipeline=4)), on)
    assert send == pytest.approx(46e9 / 46e9 + 8e-6)
    reduced = transfer(_ring(("shard",), 8, "all-reduce"), layout(Mesh(shard=8)), on)
    assert reduced == pytest.approx(46e9 / 350e9 + 2 * 7 * 3e-6)


@pytest.mark.parametrize(
    ("axes", "ranks", "stride"),
    [(("tensor",), 2, 1), (("context",), 3, 2), (("shard",), 5, 6), (("shard", "context"), 15, 2),
     (("replicate",), 7, 30), (("pipeline",), 2, 210)],
)  # fmt: skip
def test_neighbours_of_a_group_are_where_the_mesh_puts_them(
    axes: tuple[str, ...], ranks: int, stride: int
) -> None:
    mesh = Mesh(replicate=7, shard=5, tensor=2, context=3, pipeline=2)
    assert span(_ring(axes, ranks), layout(mesh)) == (stride, stride * ranks)
    last = axes[-1]
    one = next(r for r in range(1, mesh.world_size) if mesh.coordinates(r)[last] == 1)
    assert one == stride


def test_the_estimate_names_the_link_that_a_collective_crosses() -> None:
    one, on = layout(Mesh(replicate=2, shard=8)), hardware()
    figures = estimate(work_of(one), one, on)
    links = {row.group: row.link for row in figures.traffic}
    assert links["shard, 8 ranks"] == "nvlink4"
    assert links["replicate, 2 ranks"] == "infiniband-400"
    assert figures.time is not None
    assert figures.time.seconds == pytest.approx(time_of(one).seconds)
