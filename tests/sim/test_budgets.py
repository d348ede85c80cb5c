"""Budgets that run out, and machines that fail again and again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from holdfast.orchestrator.core.context import SECOND_NS

from .virtual_time import VirtualTime
from .world import BOUND_S, World

WINDOW_S = 40.0


def world_with(seed: int, **recovery: Any) -> World:
    """A world whose job has these fields of spec.recovery."""

    class Strict(World):
        def _draw_job(self) -> dict[str, Any]:
            document = super()._draw_job()
            document["spec"]["recovery"] |= {"keepProcesses": "never", **recovery}
            return document

    world = Strict(seed)
    world.poison, world.total_steps = None, 400
    world.after(0.0, world.host.start)
    return world


def ended(world: World) -> bool:
    host = world.host
    return host.up and host.submitted and host.state.terminal and not host.state.finish_action


def kill_when_training(world: World, pause_s: float, choose: Callable[[World], Any]) -> None:
    """SIGKILL for a rank of the running generation, `pause_s` after it began, again and again."""
    killed: set[int] = set()

    def act() -> None:
        state = world.host.state if world.host.up and world.host.submitted else None
        if state is not None and state.phase == "running" and state.generation not in killed:
            worker = choose(world)
            if worker is not None:
                killed.add(state.generation)
                world.after(pause_s, lambda: worker.end(None, 9))
        world.after(0.5, act)

    act()


def any_rank(world: World) -> Any:
    members = [world.nodes[name] for name in world.host.state.group.members]
    return next((w for n in members for w in n.workers.values() if w.alive), None)


# Every step is staged in these worlds.
@pytest.mark.parametrize("seed", [0, 3, 6, 9])
def test_a_job_fails_with_the_first_restart_that_its_budget_does_not_have(seed: int) -> None:
    budget = {"restarts": 3, "windowSeconds": 10_000}
    world = world_with(seed, badNodeStrikes=50, budgets={"infrastructure": budget})
    kill_when_training(world, 1.0, any_rank)
    assert VirtualTime.run(world, BOUND_S, lambda: ended(world))
    state = world.host.state
    assert state.phase == "failed" and state.reason.code == "budget"
    assert "3 restarts in the last 10000 s, 3 allowed" in state.reason.text
    classes = [i.failure_class for i in state.incidents if i.failure_class]
    assert classes == ["infrastructure"] * 4 and state.ledger.restarts == {"infrastructure": 3}
    newest = max(files[0].step for _mesh, files in world.storage.manifests.values())
    assert newest >= state.incidents[-1].step_before, "the finished steps are kept"


@pytest.mark.parametrize("seed", range(4))
def test_restarts_older_than_the_window_are_not_counted(seed: int) -> None:
    budget = {"restarts": 1, "windowSeconds": WINDOW_S}
    world = world_with(seed, badNodeStrikes=50, budgets={"infrastructure": budget})
    kill_when_training(world, WINDOW_S + 1.0, any_rank)
    VirtualTime.run(world, BOUND_S, lambda: ended(world))
    state = world.host.state
    assert state.phase == "succeeded" and state.ledger.restarts["infrastructure"] >= 2
    times = [i.at_ns for i in state.incidents if i.failure_class]
    assert all(b - a > WINDOW_S * SECOND_NS for a, b in pairwise(times))


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_fails_again_and_again_gets_no_ranks(seed: int) -> None:
    world = world_with(seed, badNodeStrikes=3)
    bad: list[str] = []

    def of_one_node(world: World) -> Any:
        members = world.host.state.group.members
        bad.extend(members[-1:] if not bad else [])
        if bad[0] not in members:
            return None
        return next((w for w in world.nodes[bad[0]].workers.values() if w.alive), None)

    kill_when_training(world, 1.0, of_one_node)
    VirtualTime.run(world, BOUND_S, lambda: ended(world))
    state = world.host.state
    assert state.phase == "succeeded" and list(state.ledger.cordoned) == bad
    blamed = [i for i in state.incidents if i.culprit_node == bad[0]]
    assert len(blamed) == 3 and list(state.ledger.strikes) == bad
    last = max(generation for generation, name in world.oracle._seats if name == bad[0])
    assert last == blamed[-1].generation_before
