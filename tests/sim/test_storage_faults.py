"""All nodes are lost, and the checkpoints are damaged, gone, or in a store that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.context import SECOND_NS

from .run_seed import play
from .world import World

SEEDS = (0, 1, 2, 3)
AT_S = 25.0


def _lose_all(world: World, fault: Callable[[World], str]) -> World:
    world.poison = None

    def happen() -> None:
        world.log(fault(world))
        world.log(world.blackout())

    world.total_steps = 160
    world.after(AT_S, happen)
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_is_away_for_15_s_charges_no_restart(seed: int) -> None:
    def faults(world: World) -> None:
        _lose_all(world, lambda world: world.store_away(30.0))

    state = play(seed, faults=faults).host.state
    unreadable = [one for one in state.incidents if one.rule == "store-unreadable"]
    lost = [one for one in state.incidents if one.rule in ("node-lost", "lost-first")]
    assert state.phase == "succeeded" and len(lost) == state.ledger.restarts["infrastructure"]
    assert len(unreadable) <= 8, "it waits longer and longer"


@pytest.mark.parametrize("seed", SEEDS)
def test_without_the_newest_manifest_the_checkpoint_before_is_restored(seed: int) -> None:
    def faults(world: World) -> None:
        _lose_all(world, World.lose_manifest)

    state = play(seed, faults=faults).host.state
    assert state.phase == "succeeded" and state.ledger.restarts["infrastructure"] <= 3
    assert state.num_incidents <= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_whose_checkpoints_are_all_damaged_waits_for_a_user(seed: int) -> None:
    decided: list[float] = []

    def faults(world: World) -> None:
        _lose_all(world, World.damage_all)

        def decide() -> None:
            state = world.host.state
            if state.hold is not None:
                decided.append((state.now_ns - state.hold.since_ns) / SECOND_NS)
                world.host.handle(e.ResumeRequested(by="user", start_over=True))

        world.after(200.0, decide)

    world = play(seed, faults=faults)
    assert world.host.state.phase == "succeeded"
    assert decided, "it held until the user decided; the oracle checks that nothing began before"
