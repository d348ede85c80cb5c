"""Ranks that are late and ranks that hang: the job waits for the former, not for the latter."""

from __future__ import annotations

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.context import SECOND_NS

from .run_seed import play
from .trainer import Delay
from .world import World

SEEDS = (1, 2, 3, 8)
AT_S = 14.0


def late(*ranks: int, delay: Delay, pressure: float = 0.0) -> World:
    """Plays one job per seed in which these ranks are late once."""

    def faults(world: World) -> None:
        world.poison = None
        world.total_steps = 120

        def begin() -> None:
            world.cpu_pressure = pressure
            world.delays |= dict.fromkeys(ranks, delay)

        world.after(AT_S, begin)

    return faults  # type: ignore[return-value]


def events(world: World) -> list[e.AnyEvent]:
    return [event for _at, event in world.host.history()]


def hangs(world: World) -> list[tuple[float, e.HangDetected]]:
    return [
        (at / SECOND_NS - 1_000, event)
        for at, event in world.host.history()
        if isinstance(event, e.HangDetected)
    ]


def require_no_restart(world: World) -> None:
    state = world.host.state
    assert [i.title for i in state.incidents if i.purpose == "failure"] == []
    assert not hangs(world) and state.ledger.restarts.get("hang", 0) == 0
    assert any(isinstance(event, e.HangSuspected) for event in events(world))
    assert any(isinstance(event, e.HangSuspicionEnded) for event in events(world))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_compilation_is_suspected_and_not_charged(seed: int) -> None:
    delay = Delay(limits.BUSY_TIMEOUT_S - 6, "compiles", uses_cpu=True)
    require_no_restart(play(seed, faults=late(0, delay=delay)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_loader_that_waits_for_its_storage_is_not_a_hang(seed: int) -> None:
    delay = Delay(limits.BUSY_TIMEOUT_S - 6, "reads", uses_cpu=False)
    require_no_restart(play(seed, faults=late(0, delay=delay)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_that_starves_all_workers_gets_four_times_as_long(seed: int) -> None:
    delay = Delay(2 * limits.BUSY_TIMEOUT_S, "nothing", uses_cpu=True)
    world = play(seed, faults=late(*range(16), delay=delay, pressure=0.9))  # type: ignore[arg-type]
    require_no_restart(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_does_nothing_while_its_peers_wait_is_a_hang(seed: int) -> None:
    delay = Delay(None, "nothing", uses_cpu=False)
    world = play(seed, faults=late(0, delay=delay))  # type: ignore[arg-type]
    if world.host.job.spec.nodes.max * world.host.job.spec.workers_per_node == 1:
        return
    ((at_s, event),) = hangs(world)
    learned_s = limits.HANG_FLOOR_S + limits.HANG_STEP_FACTOR * 1.1 * world.step_s
    assert at_s <= AT_S + world.step_s + learned_s + 1.5
    assert "is in no collective" in event.evidence and event.ranks[0] == 0
    (incident,) = [i for i in world.host.state.incidents if i.failure_class == "hang"]
    assert incident.culprit_rank == 0 and "in no collective" in incident.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_computes_without_end_is_a_hang_after_the_busy_limit(seed: int) -> None:
    delay = Delay(None, "nothing", uses_cpu=True)
    ((at_s, event),) = hangs(play(seed, faults=late(0, delay=delay)))  # type: ignore[arg-type]
    assert AT_S + limits.BUSY_TIMEOUT_S <= at_s <= AT_S + limits.BUSY_TIMEOUT_S + 4
    assert "the busy-worker limit is 30.0 s" in event.evidence


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_process_is_a_hang_within_three_seconds(seed: int) -> None:
    def faults(world: World) -> None:
        world.poison = None
        world.total_steps = 120
        world.after(AT_S, lambda: print(world._hang_worker()))

    ((at_s, event),) = hangs(play(seed, faults=faults))
    assert at_s <= AT_S + limits.HANG_FLOOR_S + 2 * limits.HEARTBEAT_INTERVAL_S
    assert "is stopped (state T)" in event.evidence and event.basis == "stopped"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_of_a_starved_machine_is_not_lost_when_its_heartbeats_are_late(seed: int) -> None:
    quiet_s = limits.HEARTBEAT_TIMEOUT_S * 2

    def faults(world: World) -> None:
        late(*range(16), delay=Delay(20.0, "nothing", uses_cpu=True), pressure=0.9)(world)  # type: ignore[operator]

        def cut() -> None:
            node = next(node for node in world.nodes.values() if node.alive)
            world._healed[node.name] = world.now + round(quiet_s * SECOND_NS)

        world.after(AT_S + 5, cut)

    world = play(seed, faults=faults)
    lost = [event for event in events(world) if isinstance(event, e.NodeLost)]
    assert [one for one in lost if one.cause == "silent"] == []
