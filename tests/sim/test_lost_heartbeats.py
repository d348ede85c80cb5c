"""No heartbeat arrives: the controller's machine is overloaded, or all nodes are lost."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.context import SECOND_NS

from .run_seed import play
from .world import World

SEEDS = (0, 1, 2, 3, 5, 8, 13)
LONGEST_S = limits.ALL_SILENT_FACTOR * limits.HEARTBEAT_TIMEOUT_S


def history(world: World) -> list[tuple[float, e.AnyEvent]]:
    """All events of the journal, with the time since the start."""
    return [(at / SECOND_NS - 1_000, event) for at, event in world.host.history()]


def lost_s(world: World) -> list[float]:
    return [at for at, event in history(world) if _is_heartbeat_timeout(event)]


def _is_heartbeat_timeout(event: e.AnyEvent) -> bool:
    """A node was lost by the heartbeat timeout, not otherwise."""
    return isinstance(event, e.NodeLost) and event.cause == "silent"


@pytest.mark.parametrize("seed", SEEDS)
def test_heartbeats_that_return_in_time_cost_nothing(seed: int) -> None:
    def faults(world: World) -> None:
        world.poison = None
        world.after(14.0, lambda: print(world.lose_heartbeats(LONGEST_S - 2.5)))

    world = play(seed, faults=faults)
    state = world.host.state
    assert lost_s(world) == [], "no node was lost"
    assert [i.title for i in state.incidents if i.purpose == "failure"] == []
    assert any(isinstance(event, e.HeartbeatsRestored) for _, event in history(world))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_nodes_are_lost_in_the_end_when_no_heartbeat_returns(seed: int) -> None:
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
def test_one_lost_node_is_detected_after_the_heartbeat_timeout(seed: int) -> None:
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
