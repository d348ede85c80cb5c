"""Rank assignment: whole replica groups, survivors keep their positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.rank_assignment import (
    assign,
    best_size,
    buddies,
    mesh_for,
    nodes_per_group,
    order_newcomers,
    persist_cadence,
    seats_for,
)
from holdfast.orchestrator.protocol.mesh import Mesh

from .harness import facts, spec


@st.composite
def situations(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
    """(previous order, available nodes, nodes wanted, nodes of a group)."""
    group = draw(st.integers(1, 4))
    before = tuple(f"n{i}" for i in range(group * draw(st.integers(0, 5))))
    lost = draw(st.sets(st.sampled_from(before))) if before else set()
    fresh = tuple(f"x{i}" for i in range(draw(st.integers(0, 6))))
    available = tuple(draw(st.permutations([n for n in before if n not in lost] + list(fresh))))
    wanted = draw(st.integers(0, len(available) // group)) * group
    return before, available, wanted, group


@given(situations())
def test_an_assignment_is_a_bijection_of_available_nodes(
    situation: tuple[tuple[str, ...], tuple[str, ...], int, int],
) -> None:
    before, available, wanted, group = situation
    chosen = assign(before, available, wanted, group)
    assert len(chosen) == wanted == len(set(chosen))
    assert set(chosen) <= set(available)


@given(situations())
def test_survivors_of_kept_groups_keep_their_positions(
    situation: tuple[tuple[str, ...], tuple[str, ...], int, int],
) -> None:
    before, available, wanted, group = situation
    chosen = assign(before, available, wanted, group)
    if wanted >= len(before):
        for place, name in enumerate(before):
            assert name not in available or chosen[place] == name
        return
    groups = [before[i : i + group] for i in range(0, len(before), group)]
    whole = [g for g in groups if set(g) <= set(available)]
    kept = [chosen[i : i + group] for i in range(0, wanted, group)]
    expected = whole[: len(kept)]
    assert [g for g in kept if g in expected] == expected


@given(situations())
def test_an_assignment_depends_on_its_arguments_only(
    situation: tuple[tuple[str, ...], tuple[str, ...], int, int],
) -> None:
    assert assign(*situation) == assign(*situation)


def test_a_newcomer_takes_the_position_of_the_lost_node() -> None:
    assert assign(("a", "b", "c", "d"), ("a", "c", "d", "x"), 4, 2) == ("a", "x", "c", "d")


def test_a_shrink_drops_the_damaged_group() -> None:
    assert assign(("a", "b", "c", "d"), ("a", "c", "d"), 2, 2) == ("c", "d")


def test_two_damaged_groups_become_one_by_position() -> None:
    assert assign(("a", "b", "c", "d"), ("b", "c"), 2, 2) == ("c", "b")


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="4 nodes in groups of 2 out of 3"):
        assign((), ("a", "b", "c"), 4, 2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_each_shard_is_written_by_exactly_one_rank(
    replicate: int, shard: int, workers: int
) -> None:
    mesh = Mesh(replicate=replicate * workers, shard=shard)
    nodes = mesh.world_size // workers
    seats = [seat for node in seats_for(mesh, nodes, workers) for seat in node]
    assert [seat.rank for seat in seats] == list(range(mesh.world_size))
    assert sorted(seat.shard for seat in seats if seat.persists) == list(range(shard))
    load = [sum(s.persists for s in node) for node in seats_for(mesh, nodes, workers)]
    assert max(load) - min(load) <= 1 or shard < nodes or workers < shard


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(4, Mesh(replicate=2, shard=4)), (3, None), (2, Mesh(shard=4)), (1, None), (0, None)],
)
def test_only_whole_replica_groups_make_a_mesh(nodes: int, expected: Mesh | None) -> None:
    job = job_from_mapping(spec({"min": 2, "max": 4}, shard=4))
    assert mesh_for(job, nodes) == expected


def test_the_best_size_is_the_largest_that_fits() -> None:
    job = job_from_mapping(spec({"min": 2, "max": 4}, shard=4))
    assert [best_size(job, limit) for limit in (1, 2, 3, 4)] == [0, 2, 2, 4]


def test_newcomers_are_ordered_by_topology() -> None:
    known = [
        ("a", facts("a", topology=("z1", "r2")), 1),
        ("b", facts("b", topology=("z1", "r1")), 2),
        ("c", facts("c", topology=("z1", "r2")), 3),
    ]
    assert order_newcomers(known) == ("b", "a", "c")


def test_a_buddy_is_in_another_failure_domain() -> None:
    job = job_from_mapping(spec({"min": 4, "max": 4}, shard=8))
    known = {n: facts(n, failure_domain=d) for n, d in zip("abcd", "1122", strict=True)}
    chosen = buddies(job, Mesh(shard=8), ("a", "b", "c", "d"), known)
    assert chosen == {"a": "c", "b": "c", "c": "a", "d": "a"}


def test_replicas_need_no_buddy_unless_configured() -> None:
    mesh = Mesh(replicate=2, shard=2)
    known = {n: facts(n) for n in "ab"}
    plain, never = job_from_mapping(spec()), {"memory": {"buddy": "never"}}
    assert buddies(plain, mesh, ("a", "b"), known) == {}
    always = job_from_mapping(spec(checkpoint={"memory": {"buddy": "always"}}))
    assert buddies(always, mesh, ("a", "b"), known) == {"a": "b", "b": "a"}
    assert buddies(job_from_mapping(spec(checkpoint=never)), Mesh(shard=4), ("a", "b"), known) == {}


@pytest.mark.parametrize(
    ("storage", "every"), [({}, 100), ({"everySteps": 7}, 7), ({"everySeconds": 60}, 0)]
)
def test_the_storage_cadence(storage: dict[str, int], every: int) -> None:
    assert persist_cadence(job_from_mapping(spec(checkpoint={"storage": storage}))) == every


def test_a_hole_is_filled_by_the_node_with_the_same_position() -> None:
    assert assign(tuple("abcdef"), tuple("abef"), 3, 3) == ("a", "b", "f")
    assert assign(tuple("abcdef"), tuple("abdx"), 3, 3) == ("a", "b", "d"), "before a newcomer"


def test_a_count_that_is_no_multiple_of_the_group_or_a_double_name_is_refused() -> None:
    with pytest.raises(ValueError, match="3 nodes in groups of 2 out of 4"):
        assign((), ("a", "b", "c", "d"), 3, 2)
    with pytest.raises(ValueError, match="2 nodes in groups of 2 out of 3"):
        assign((), ("a", "b", "a"), 2, 2)


def test_shards_are_written_by_the_least_loaded_nodes() -> None:
    """Four nodes of one worker in two replicas of two shards."""
    seats = seats_for(Mesh(replicate=2, shard=2), 4, 1)
    assert [seat.persists for node in seats for seat in node] == [True, True, False, False]
    seats = seats_for(Mesh(replicate=2, shard=2), 2, 2)
    assert [[seat.persists for seat in node] for node in seats] == [[True, False], [False, True]]
    assert [[seat.shard for seat in node] for node in seats] == [[0, 1], [0, 1]]
    assert [[seat.local_rank for seat in node] for node in seats] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("shards", "workers", "nodes"), [(4, 2, 2), (3, 2, 2), (2, 2, 1), (1, 4, 1)]
)
def test_a_replica_group_covers_whole_nodes(shards: int, workers: int, nodes: int) -> None:
    assert nodes_per_group(Mesh(shard=shards), workers) == nodes


def test_a_single_node_and_a_job_without_memory_tier_have_no_buddies() -> None:
    known = {n: facts(n) for n in "ab"}
    plain = job_from_mapping(spec())
    assert buddies(plain, Mesh(shard=2), ("a",), known) == {}
    assert buddies(plain, Mesh(shard=4), ("a", "b"), known) == {"a": "b", "b": "a"}
    none = job_from_mapping(spec(checkpoint={"memory": {"everySteps": 0}}))
    assert buddies(none, Mesh(shard=4), ("a", "b"), known) == {}


def test_a_node_without_a_failure_domain_is_one_of_its_own() -> None:
    job = job_from_mapping(spec({"min": 3, "max": 3}, shard=6))
    known = {n: facts(n, failure_domain=d) for n, d in zip("abc", ("", "z", "z"), strict=True)}
    assert buddies(job, Mesh(shard=6), ("a", "b", "c"), known) == {"a": "b", "b": "a", "c": "a"}
    alone = {n: facts(n, failure_domain="z") for n in "abc"}
    assert buddies(job, Mesh(shard=6), ("a", "b", "c"), alone) == {"a": "b", "b": "c", "c": "a"}


def test_an_order_of_another_group_size_is_filled_up() -> None:
    assert assign(("a", "b", "c"), ("a", "b", "c", "d"), 4, 2) == ("a", "b", "c", "d")
    assert assign(("a", "b", "c"), ("b", "c", "d", "e"), 4, 4) == ("d", "b", "c", "e")
