"""The buddy tier with states of real size: a lost node costs at most the promised steps."""

from __future__ import annotations

from typing import Any

import pytest

from . import run_seed
from .sizes import Sizes
from .world import World

CRASHES_S = (40.0, 70.3, 101.1, 131.7)
STEP_S = 0.4


class BuddyWorld(World):
    """FSDP over two or three nodes, one worker each, and spares; no storage within the run."""

    push_steps: float = 1.0

    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.total_steps, self.step_s, self.poison = 400, STEP_S, None
        self.capacity = 30
        self.sizes = Sizes.of(self.push_steps, 0.02, STEP_S, 1, 13 * 10**9)

    def _draw_job(self) -> dict[str, Any]:
        document = super()._draw_job()
        spec = document["spec"]
        size = 2 + self.seed % 2
        spec["nodes"] = {"min": size, "max": size, "spares": 4}
        spec["workersPerNode"], spec["parallelism"] = 1, {"shard": size}
        spec["recovery"] |= {"badNodeStrikes": 50, "keepProcesses": "never"}
        spec["checkpoint"] = {"storage": {"everySteps": 10_000}, "memory": {"everySteps": 1}}
        return document


def crashes(world: World) -> None:
    for at_s in CRASHES_S:
        world.after(at_s, lambda: _crash_member(world))


def _crash_member(world: World) -> None:
    state = world.host.state
    name = world.rng.choice(state.group.members)
    if name in world.nodes:
        world.node_dies(world.nodes[name], visible=True, why="crash")


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("push_steps", [0.1, 0.5, 1, 2, 3, 5, 7, 10])
def test_a_lost_node_costs_at_most_two_rounds(push_steps: float, seed: int) -> None:
    class Slow(BuddyWorld):
        pass

    Slow.push_steps = push_steps
    world = run_seed.play(seed, faults=crashes, make=Slow)
    incidents = world.host.state.incidents
    assert len(incidents) == len(CRASHES_S) == len(world.oracle.saved)
    for incident in incidents:
        assert incident.restored_from == "memory"
        lost = incident.step_before - incident.resumed_after_step
        assert lost <= 2 * 1.1 * push_steps + 4, f"{lost} steps with pushes of {push_steps}"
