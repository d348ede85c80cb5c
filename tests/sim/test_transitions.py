"""Every transition of the core's table is taken in the simulation, and no other: the core refuses
one that the table does not have (IllegalTransition), and no seed gets there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.orchestrator.core import context, transitions
from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core.transitions import TRANSITIONS, JobPhase

from .run_seed import play
from .world import World

Edge = tuple[JobPhase, JobPhase]
Act = Callable[[World], None]
SEED = 4
COMMON = range(0, 100, 9)
"""Seeds with random faults; they take the transitions for which there is no scenario below."""


def cancel(world: World) -> None:
    world.cancelled = True
    world.host.handle(e.CancelRequested(by="test"))


def suspend(world: World) -> None:
    world.host.handle(e.SuspendRequested(by="test"))


def resume(world: World) -> None:
    world.host.handle(e.ResumeRequested(by="test"))


def kill_worker(world: World) -> None:
    worker = next(w for n in world.nodes.values() for w in n.workers.values() if w.alive)
    worker.end(None, 9)


def lose_all_nodes(world: World) -> None:
    for node in list(world.nodes.values()):
        world.node_dies(node, visible=True, why="crash")


def lose_all_capacity(world: World) -> None:
    world.capacity = 0
    lose_all_nodes(world)
    world.after(90.0, lambda: setattr(world, "capacity", 9))


def break_training(world: World) -> None:
    world.poison = world.total_steps - 2


def nothing(world: World) -> None:
    """Wait for the phase."""


SCENARIOS: dict[Edge, tuple[tuple[JobPhase, Act], ...]] = {
    ("pending", "suspending"): (("pending", suspend), ("suspended", resume)),
    ("pending", "finishing"): (("pending", cancel),),
    ("starting", "recovering"): (("starting", lose_all_nodes),),
    ("starting", "finishing"): (("starting", cancel),),
    ("starting", "suspending"): (("starting", suspend), ("suspended", resume)),
    ("running", "suspending"): (("running", suspend), ("suspended", resume)),
    ("recovering", "pending"): (("running", lose_all_capacity), ("pending", nothing)),
    ("recovering", "finishing"): (("running", kill_worker), ("recovering", cancel)),
    ("recovering", "suspending"): (
        ("running", kill_worker), ("recovering", suspend), ("suspended", resume),
    ),
    ("finishing", "recovering"): (("finishing", lose_all_nodes),),
    ("finishing", "failed"): (("running", break_training),),
    ("finishing", "cancelled"): (("running", cancel),),
    ("suspending", "recovering"): (("running", suspend), ("suspending", resume)),
    ("suspending", "finishing"): (("running", suspend), ("suspending", cancel)),
    ("suspending", "suspended"): (("running", suspend), ("suspended", resume)),
    ("suspended", "pending"): (("running", suspend), ("suspended", resume)),
    ("suspended", "finishing"): (("running", suspend), ("suspended", cancel)),
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[Edge, None]:
    """Filled with the transitions that are taken from now on."""
    found: dict[Edge, None] = {}

    def check(phase: JobPhase, then: JobPhase) -> None:
        transitions.check_transition(phase, then)
        found[phase, then] = None

    monkeypatch.setattr(context, "check_transition", check)
    return found


def scripted(*acts: tuple[JobPhase, Act]) -> Act:
    """Faults that are not drawn: each act comes as soon as the job has reached its phase."""

    def look(world: World, left: tuple[tuple[JobPhase, Act], ...]) -> None:
        if left and world.host.up and world.host.state.phase == left[0][0]:
            left[0][1](world)
            left = left[1:]
        if left:
            world.after(0.01, lambda: look(world, left))

    def begin(world: World) -> None:
        world.poison = None
        world.after(0.01, lambda: look(world, acts))

    return begin


@pytest.mark.parametrize("edge", SCENARIOS, ids=" to ".join)
def test_a_scripted_job_takes_a_transition(edge: Edge, taken: dict[Edge, None]) -> None:
    play(SEED, faults=scripted(*SCENARIOS[edge]))
    assert edge in taken


def test_seeds_take_the_other_transitions_and_none_that_the_table_lacks(
    taken: dict[Edge, None],
) -> None:
    for seed in COMMON:
        play(seed)
    assert set(taken) | set(SCENARIOS) == set(TRANSITIONS)
