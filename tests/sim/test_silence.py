"""The controller hears nobody: its own machine is starved, or all nodes are lost."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core import events as e

from .run_seed import play
from .virtual_time import NS
from .world import World

SEEDS = (0, 1, 2, 3, 5, 8, 13)
LONGEST_S = limits.ALL_SILENT_FACTOR * limits.HEARTBEAT_TIMEOUT_S


def told(world: World) -> list[tuple[float, e.AnyEvent]]:
    """Everything durable that the controller was told, by the time of the story."""
    return [(at / NS - 1_000, event) for at, event in world.host.history()]


def lost_s(world: World) -> list[float]:
    return [at for at, event in told(world) if _is_silent(event)]


def _is_silent(event: e.AnyEvent) -> bool:
    """Given up for its silence; nodes that end otherwise are nothing to us."""
    return isinstance(event, e.NodeLost) and event.cause == "silent"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_silence_of_everybody_that_ends_costs_nothing(seed: int) -> None:
    def faults(world: World) -> None:
        world.poison = None
        world.after(14.0, lambda: print(world.silence(LONGEST_S - 2.5)))

    world = play(seed, faults=faults)
    state = world.host.state
    assert lost_s(world) == [], "nobody was lost"
    assert [i.title for i in state.incidents if i.purpose == "failure"] == []
    assert any(isinstance(event, e.HeartbeatsRestored) for _, event in told(world))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_of_everybody_is_believed_in_the_end(seed: int) -> None:
    def faults(world: World) -> None:
        world.poison = None
        world.after(14.0, lambda: print(world.blackout()))

    world = play(seed, faults=faults)
    lost = lost_s(world)
    assert lost, "all nodes were lost"
    assert min(lost) >= 14.0 + limits.HEARTBEAT_TIMEOUT_S - limits.HEARTBEAT_INTERVAL_S
    assert max(lost) <= 14.0 + LONGEST_S + 0.1
    assert world.host.state.phase == "succeeded"


@pytest.mark.parametrize("seed", SEEDS)
def test_one_lost_node_is_noticed_as_fast_as_ever(seed: int) -> None:
    def faults(world: World) -> None:
        world.poison = None

        def one() -> None:
            node = next(node for node in world.nodes.values() if node.alive)
            world.node_dies(node, visible=False, why="power loss")

        world.after(14.0, one)

    world = play(seed, faults=faults)
    if world.document["spec"]["nodes"]["max"] > 1:
        (at,) = lost_s(world)
        assert at <= 14.0 + limits.HEARTBEAT_TIMEOUT_S + 0.1
