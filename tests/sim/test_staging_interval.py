"""The chosen staging interval in a whole job: a fault costs at most the steps that it promises."""

from __future__ import annotations

from typing import Any

import pytest

from . import run_seed
from .sizes import Sizes
from .world import World

FAULTS_AT_S = (40.0, 63.2, 84.9, 110.1)
STEP_S = 0.4
PUSH_STEPS = 2.0


class AutoWorld(World):
    """FSDP over two nodes with spares; a staging blocks the loop for `stall_steps` steps."""

    stall_steps = 0.1

    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.total_steps, self.step_s, self.poison, self.capacity = 400, STEP_S, None, 30
        self.sizes = Sizes.of(PUSH_STEPS, self.stall_steps, STEP_S, 2, 13 * 10**9)

    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        spec["nodes"] = {"min": 2, "max": 2, "spares": 3}
        spec["workersPerNode"], spec["parallelism"] = 2, {"shard": 4}
        spec["recovery"]["badNodeStrikes"] = 50
        spec["checkpoint"] = {"storage": {"everySteps": 10_000}}
        return document


def faults(world: World) -> None:
    """Kill a worker and a node by turns."""
    for index, at_s in enumerate(FAULTS_AT_S):
        world.after(at_s, lambda node=index % 2 == 1: _fault(world, node))


def _fault(world: World, node: bool) -> None:
    name = world.rng.choice(world.host.state.group.members)
    if node:
        world.node_dies(world.nodes[name], visible=True, why="crash")
    else:
        live = [worker for worker in world.nodes[name].workers.values() if worker.alive]
        world.after(0.0, lambda: world.rng.choice(live).end(None, 9))


@pytest.mark.parametrize(("stall_steps", "every"), [(0.01, 1), (0.1, 4), (0.5, 17)])
def test_a_fault_costs_at_most_the_interval(stall_steps: float, every: int) -> None:
    class Stalled(AutoWorld):
        pass

    Stalled.stall_steps = stall_steps
    world = run_seed.play(7, faults=faults, make=Stalled)
    state = world.host.state
    assert state.stage_every_steps == every
    assert [one.restored_from for one in state.incidents] == ["memory"] * len(FAULTS_AT_S)
    for one in state.incidents:
        lost = one.step_before - one.resumed_after_step
        one_round = PUSH_STEPS * 1.1 + 2 * every
        assert lost <= (
            2 * one_round + 4 if one.culprit_node and "lost" in one.title else every + 1
        )
