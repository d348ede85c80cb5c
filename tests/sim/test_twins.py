"""Ranks of a node with the same shard stage it together, in whole jobs with faults."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from holdfast.orchestrator import limits

from . import run_seed
from .sizes import Sizes
from .world import World

SHAPES = ((1, 4, 1), (2, 2, 1), (2, 4, 2), (2, 4, 4))
"""(nodes, workers per node, shard): DDP on one node and on two, HSDP in a node with two and with
four ranks a replica group; the last one has no twins on a node."""


class TwinWorld(World):
    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        nodes, workers, shard = SHAPES[self.seed % len(SHAPES)]
        spec["nodes"] = {"min": 1, "max": nodes, "spares": 1}
        spec["workersPerNode"], spec["parallelism"] = workers, {"shard": shard}
        return document


@functools.cache
def play(seed: int) -> World:
    return run_seed.play(seed, make=TwinWorld)


@pytest.mark.parametrize("seed", range(40))
def test_the_job_ends_as_expected_and_leaves_nothing_behind(seed: int) -> None:
    play(seed)


class Undisturbed(World):
    """DDP of 1.5 billion parameters on 8 workers: 18 GB at 10 GB/s, beside steps of 0.5 s."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.total_steps, self.step_s, self.poison, self.capacity = 200, 0.5, None, 30
        self.sizes = Sizes(18 * 10**9, 10e9, 1e9)

    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        spec["nodes"] = {"min": 1, "max": 1}
        spec["workersPerNode"], spec["parallelism"] = 8, {"shard": 1}
        spec["checkpoint"] = {"storage": {"everySteps": 10_000}}
        return document


def test_eight_twins_stage_one_shard_and_so_eight_times_as_often() -> None:
    world = run_seed.play(1, faults=lambda _: None, make=Undisturbed)
    (node,) = world.nodes.values()
    shard = world.sizes.shard_bytes
    assert node.most_bytes == limits.STAGING_BUFFERS * shard, "not eight times as many"
    state = world.host.state
    stall_s = world.sizes.stall_s / 8  # 0.225 s, where each alone would take 1.8 s
    budget_s = 0.03 * world.step_s
    assert state.stage_every_steps == pytest.approx(stall_s / budget_s, abs=1)
    stagings = {worker.staged_bytes for worker in node.workers.values()}
    assert len(stagings) == 1 and node.staged_bytes == 8 * stagings.pop()
    assert node.staged_bytes % shard == 0, "together they copy whole shards"


def test_the_node_that_is_left_has_the_whole_shard() -> None:
    class TwoNodes(TwinWorld):
        def __init__(self, seed: int, verbose: bool = False) -> None:
            super().__init__(seed, verbose)
            self.total_steps, self.poison, self.capacity = 60, None, 30

        def _draw_job(self) -> dict[str, Any]:
            document = super()._draw_job()
            document["spec"]["nodes"] = {"min": 2, "max": 2, "spares": 1}
            document["spec"]["checkpoint"] = {"storage": {"everySteps": 10_000}}
            document["spec"]["checkpoint"]["memory"] = {"everySteps": 1}
            return document

    def lose_one(world: World) -> None:
        world.after(15.0, lambda: world.node_dies(_first(world), visible=True, why="crash"))

    def _first(world: World) -> Any:
        return world.nodes[world.host.state.group.members[0]]

    world = run_seed.play(1, faults=lose_one, make=TwoNodes)
    (incident,) = world.host.state.incidents
    assert incident.restored_from == "memory"
    assert incident.step_before - incident.resumed_after_step <= 1
