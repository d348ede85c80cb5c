"""The choice of the mesh, on every size a job may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.planner.choose import choose_mesh, num_nodes_used
from holdfast.orchestrator.planner.memory import USABLE, WorkerMemory, device_bytes
from holdfast.orchestrator.protocol.mesh import Mesh

from .builders import make_job, planned

GIB = 2**30
BIG = {"model": {"dim": 1024, "numLayers": 24, "numHeads": 16, "vocabSize": 32000}}


def mesh_of(chosen: tuple[Mesh, str] | None) -> Mesh:
    assert chosen is not None
    return chosen[0]


def test_auto_shards_within_a_node_and_replicates_over_nodes() -> None:
    mesh, why = choose_mesh(make_job(), 2) or (None, "")
    assert mesh == Mesh(replicate=2, shard=2)
    assert "not known" in why


def test_a_lost_node_removes_its_whole_replica_group() -> None:
    job = make_job(nodes=(2, 4), parallelism={"shard": 4})
    assert mesh_of(choose_mesh(job, 4)) == Mesh(replicate=2, shard=4)
    mesh, why = choose_mesh(job, 3) or (None, "")
    assert mesh == Mesh(replicate=1, shard=4)
    assert "2 of 3 nodes used" in why


def test_without_a_whole_replica_group_there_is_no_mesh() -> None:
    job = make_job(nodes=(2, 4), parallelism={"shard": 4})
    assert choose_mesh(job, 1) is None


def test_fewer_nodes_than_the_minimum_have_no_mesh() -> None:
    assert choose_mesh(make_job(nodes=(2, 4)), 1) is None


def test_over_the_world_the_shard_axis_follows_the_number_of_nodes() -> None:
    job = make_job(nodes=(1, 4), parallelism={"shard": "world"})
    for nodes in (4, 3, 1):
        assert mesh_of(choose_mesh(job, nodes)) == Mesh(shard=2 * nodes)
    _mesh, why = choose_mesh(job, 3) or (None, "")
    assert why == "shard world: all 6 workers share one copy"


def test_over_the_world_the_other_axes_must_divide_the_workers() -> None:
    job = make_job(nodes=(2, 4), parallelism={"shard": "world", "tensor": 4})
    assert mesh_of(choose_mesh(job, 4)) == Mesh(shard=2, tensor=4)
    mesh, why = choose_mesh(job, 3) or (None, "")
    assert mesh == Mesh(shard=1, tensor=4)
    assert why.endswith("all 4 workers share one copy; 2 of 3 nodes used, in groups of 4 workers")
    assert choose_mesh(job, 1) is None


def test_over_the_world_a_size_that_cannot_hold_the_states_has_no_mesh() -> None:
    job = make_job(nodes=(1, 4), recipe=BIG, parallelism={"shard": "world"})
    assert mesh_of(choose_mesh(job, 4, WorkerMemory(2 * GIB))) == Mesh(shard=8)
    assert choose_mesh(job, 1, WorkerMemory(2 * GIB)) is None


def test_more_nodes_than_the_maximum_change_nothing() -> None:
    job = make_job()
    assert choose_mesh(job, 9) == choose_mesh(job, 2)


def test_a_fixed_replicate_sets_the_shard_size_for_all_sizes() -> None:
    job = make_job(nodes=(1, 4), parallelism={"replicate": 4})
    assert mesh_of(choose_mesh(job, 4)) == Mesh(replicate=4, shard=2)
    assert mesh_of(choose_mesh(job, 3)) == Mesh(replicate=3, shard=2)


@pytest.mark.parametrize(
    ("gib", "shard", "why"),
    [(64, 1, "one worker holds a full copy"), (4, 2, "the 2 workers of a node share one copy"),
     (3, 4, "4 workers share one copy"), (1, 8, "the whole world, and still")],
)  # fmt: skip
def test_a_known_memory_gives_the_fewest_ranks_per_copy_that_fit(
    gib: int, shard: int, why: str
) -> None:
    job = make_job(nodes=(1, 4), workers=2, recipe=BIG)
    mesh, reason = choose_mesh(job, 4, WorkerMemory(gib * GIB)) or (None, "")
    assert mesh == Mesh(replicate=8 // shard, shard=shard)
    assert why in reason

    def needs(shard: int) -> int:
        return device_bytes(*planned(job, Mesh(replicate=8 // shard, shard=shard)))

    if shard < 8:
        assert needs(shard) <= USABLE * gib * GIB
    if shard > 1:
        assert needs(shard // 2) > USABLE * gib * GIB


def test_auto_falls_back_to_one_group_of_the_remaining_workers() -> None:
    job = make_job(nodes=(1, 4), workers=2, recipe=BIG)
    memory = WorkerMemory(2 * GIB)
    assert mesh_of(choose_mesh(job, 4, memory)) == Mesh(shard=8)
    for nodes in (3, 2):
        mesh, why = choose_mesh(job, nodes, memory) or (None, "")
        assert mesh == Mesh(shard=2 * nodes)
        assert why.startswith(f"shard auto: all {2 * nodes} remaining workers share one copy")
    assert choose_mesh(job, 1, memory) is None, "two workers cannot hold the states"


def test_a_size_that_cannot_hold_the_states_is_refused() -> None:
    job = make_job(nodes=(1, 8), workers=1, recipe=BIG)
    assert choose_mesh(job, 8, WorkerMemory(5 * GIB)) is not None
    assert choose_mesh(job, 1, WorkerMemory(5 * GIB)) is None


def test_the_memory_of_a_cpu_worker_is_that_of_the_spec() -> None:
    job = make_job(nodes=(1, 2), recipe={}, resources={"memory": "4Gi"})
    _, why = choose_mesh(job, 2) or (None, "")
    assert "of 4.0 GiB" in why


def test_other_axes_keep_their_sizes_on_a_shrink() -> None:
    job = make_job(nodes=(1, 4), workers=4, parallelism={"tensor": 2})
    assert mesh_of(choose_mesh(job, 4)) == Mesh(replicate=4, shard=2, tensor=2)
    assert mesh_of(choose_mesh(job, 2)) == Mesh(replicate=2, shard=2, tensor=2)


sizes = st.integers(1, 6)


@given(
    nodes=st.integers(1, 12),
    workers=sizes,
    shard=st.one_of(st.just("auto"), sizes),
    tensor=st.integers(1, 3),
    available=st.integers(1, 14),
)
def test_every_mesh_is_whole_groups_on_whole_nodes(
    nodes: int, workers: int, shard: int | str, tensor: int, available: int
) -> None:
    try:
        parallelism = {"shard": shard, "tensor": tensor}
        job = make_job(nodes=(1, nodes), workers=workers, parallelism=parallelism)
    except SpecError:
        return
    chosen = choose_mesh(job, available)
    if chosen is None:
        return
    mesh, why = chosen
    assert mesh.world_size % workers == 0
    assert 1 <= num_nodes_used(job, mesh) <= min(available, nodes)
    assert mesh.tensor == tensor
    assert shard in ("auto", mesh.shard)
    assert why


@given(nodes=st.integers(1, 12), workers=sizes, shard=st.one_of(st.just("auto"), sizes))
def test_the_full_size_always_has_a_mesh_that_uses_every_node(
    nodes: int, workers: int, shard: int | str
) -> None:
    try:
        job = make_job(nodes=(1, nodes), workers=workers, parallelism={"shard": shard})
    except SpecError:
        return
    chosen = choose_mesh(job, nodes)
    assert chosen is not None
    assert chosen[0].world_size == nodes * workers
