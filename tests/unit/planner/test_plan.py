"""The plan that `holdfast plan` shows."""

from __future__ import annotations

from holdfast.orchestrator.planner import make_plan
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts

from .builders import FACTS, make_job


def test_a_script_gets_a_mesh_but_no_memory_table() -> None:
    plan = make_plan(make_job(), FACTS)
    assert plan is not None
    assert plan.memory == ()
    assert plan.parameters is None


def test_the_plan_puts_every_rank_on_one_node() -> None:
    plan = make_plan(make_job(recipe={}), FACTS)
    assert plan is not None
    ranks = [rank.rank for node in plan.nodes for rank in node.ranks]
    assert ranks == list(range(plan.mesh.world_size))
    assert [size.nodes for size in plan.sizes] == [1, 2]
    assert plan.sizes[0].samples_per_rank == 4


def test_the_plan_warns_when_a_smaller_size_runs_out_of_memory() -> None:
    gpus = (Gpu("H200", 3 * 2**30),) * 2
    facts = NodeFacts(hostname="a", address="10.0.0.1", data_port=1, slots=2, gpus=gpus)
    recipe = {
        "globalBatch": 64,
        "data": {"sequenceLength": 512},
        "model": {"dim": 512, "numHeads": 8},
    }
    plan = make_plan(make_job(recipe=recipe, resources={"gpu": 1}), facts)
    assert plan is not None
    assert any("on 1 node " in warning for warning in plan.warnings)


def test_a_wide_range_of_sizes_shows_its_ends() -> None:
    plan = make_plan(make_job(nodes=(2, 1000), recipe={}), FACTS, num_nodes=3)
    assert plan is not None
    counts = [size.nodes for size in plan.sizes]
    assert counts[0] == 2
    assert counts[-1] == 1000
    assert len(counts) <= 7
