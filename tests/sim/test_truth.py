"""One known fault per job. What the controller concludes and reports is compared with the truth:
class and culprit, strikes and cordons, the times, the steps lost, the size of the job."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.state import IncidentRecord
from holdfast.workers.agent.machine import inputs

from .run_seed import play
from .trainer import SimWorker
from .world import World

SEEDS = 3
TOTAL_STEPS = 150
Act = Callable[[World, SimWorker, random.Random], None]


@dataclass
class Truth:
    """The fault, and the job when it came."""

    at_ns: int = 0
    node: str = ""
    rank: int = -1
    nodes: int = 0
    finished: int = -1
    """The last step that all ranks had finished."""


@dataclass(frozen=True)
class Kind:
    act: Act
    failure_class: str = ""
    """Empty: no incident follows."""
    limit_s: float = 0.0
    """Seconds to the next step, beside four steps."""
    names_rank: bool = False
    strikes: bool = False
    loses_node: bool = False


def _signal(number: int) -> Act:
    return lambda world, worker, rng: worker.end(None, number)


def _dies(visible: bool) -> Act:
    return lambda world, worker, rng: world.node_dies(worker.node, visible=visible, why="test")


def _preempted(world: World, worker: SimWorker, rng: random.Random) -> None:
    world.leaving[worker.node.name] = None
    worker.node.feed(inputs.Terminated(30.0))


def _cut_off(world: World, worker: SimWorker, rng: random.Random) -> None:
    world._healed[worker.node.name] = world.now + round(rng.uniform(0.3, 2.0) * SECOND_NS)


def _link_breaks(world: World, worker: SimWorker, rng: random.Random) -> None:
    if worker.node.link is not None:
        worker.node.link.close()


KINDS = {
    "killed": Kind(_signal(9), "infrastructure", 4, names_rank=True, strikes=True),
    "crashed": Kind(_signal(11), "infrastructure", 4, names_rank=True, strikes=True),
    "stopped": Kind(
        lambda world, worker, rng: worker.node.stop_worker(worker), "hang", 9,
        names_rank=True, strikes=True,
    ),
    "node-crash": Kind(_dies(True), "infrastructure", 9, strikes=True, loses_node=True),
    "power-loss": Kind(_dies(False), "infrastructure", 20, strikes=True, loses_node=True),
    "preempted": Kind(_preempted, "preemption", 60, loses_node=True),
    "controller": Kind(lambda world, worker, rng: world.host.crash()),
    "link": Kind(_link_breaks),
    "cut-off": Kind(_cut_off),
    "damaged": Kind(lambda world, worker, rng: world._damage_checkpoint() and None),
}  # fmt: skip


def fault(kind: Kind, seed: int, truth: Truth) -> Callable[[World], None]:
    """Schedules the fault at a random moment of a job that trains."""
    rng = random.Random(f"truth {seed}")

    def act(world: World) -> None:
        state = world.host.state
        busy = state.stop is not None or {"grow", "standbys"} & state.timers.keys()
        nodes = [world.nodes[name] for name in state.group.members if world.nodes[name].alive]
        ranks = [w for node in nodes for w in node.workers.values() if w.alive]
        if state.phase != "running" or busy or not ranks:
            world.after(1.0, lambda: act(world))
            return
        worker = rng.choice(ranks)
        truth.at_ns, truth.node, truth.rank = world.now, worker.node.name, worker.rank
        truth.nodes, truth.finished = len(state.group.members), min(w.step for w in ranks)
        world.fault_s = world.time_s
        kind.act(world, worker, rng)

    def schedule(world: World) -> None:
        world.poison, world.total_steps, world.unfit_share = None, TOTAL_STEPS, 0.0
        world.after(rng.uniform(6.0, 12.0), lambda: act(world))

    return schedule


def judged(world: World, truth: Truth) -> list[IncidentRecord]:
    """Incidents since the fault that have a failure class."""
    incidents = world.host.state.incidents
    return [i for i in incidents if i.failure_class and (i.noticed_ns or i.at_ns) >= truth.at_ns]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", KINDS)
def test_what_is_concluded_of_a_fault_is_true(name: str, seed: int) -> None:
    check(name, seed)


def check(name: str, seed: int) -> None:
    """Play one job and compare; `python -m tests.sim.test_truth` does so for many seeds."""
    kind, truth = KINDS[name], Truth()
    world = play(seed, faults=fault(kind, seed, truth))
    state, require = world.host.state, world.oracle.require
    require(truth.at_ns > 0, "the fault came too late")
    incidents = judged(world, truth)
    seen = [(i.failure_class, i.rule, i.title) for i in incidents]
    struck = {node: len(times) for node, times in state.ledger.strikes.items() if times}
    require(len(incidents) == bool(kind.failure_class), f"{name}: incidents {seen}")
    require(struck == ({truth.node: 1} if kind.strikes else {}), f"{name}: strikes {struck}")
    require(not state.ledger.cordoned, f"{name}: {state.ledger.cordoned}")
    if not kind.failure_class:
        return
    (incident,) = incidents
    require(incident.failure_class == kind.failure_class, f"{name}: {seen}")
    require(incident.culprit_node == truth.node, f"{name}: blamed {incident.culprit_node}")
    if kind.names_rank:
        require(incident.culprit_rank == truth.rank, f"{name}: blamed {incident.culprit_rank}")
    require(truth.node in incident.title, f"{name}: {incident.title!r} does not name the node")
    _times(world, kind, truth, incident)
    _steps(world, truth, incident)
    after = incident.world_size_after
    require(kind.loses_node or after == incident.world_size_before, f"{name}: {after} ranks")


def _times(world: World, kind: Kind, truth: Truth, incident: IncidentRecord) -> None:
    """The incident begins with the fault, and is over soon."""
    assert incident.first_step_ns is not None
    took_s = (incident.first_step_ns - truth.at_ns) / SECOND_NS
    limit_s = kind.limit_s + 4 * world.step_s
    world.oracle.require(took_s <= limit_s, f"next step after {took_s:.1f} s: {incident.decision}")
    late_s = (incident.at_ns - truth.at_ns) / SECOND_NS
    beat_s = world.host.job.spec.recovery.heartbeat_interval_s
    preempted = incident.failure_class == "preemption"
    allowed = -world.step_s - beat_s <= late_s <= 2 * beat_s + 1.0 or preempted
    world.oracle.require(allowed, f"the incident begins {late_s:.2f} s after the fault")


def _steps(world: World, truth: Truth, incident: IncidentRecord) -> None:
    """The lost steps that the incident shows are those that were lost."""
    require, after = world.oracle.require, incident.resumed_after_step
    assert after is not None
    if incident.failure_class == "preemption":
        require(after >= truth.finished, f"a notice cost steps: {after} of {truth.finished}")
        return
    shown, lost = incident.step_before - after, truth.finished - after
    require(shown >= lost or incident.at_least, f"{lost} steps lost, {shown} shown")
    require(shown <= max(lost, 0) + 1, f"{shown} steps shown, {lost} lost")
    every = world.host.state.stage_every_steps
    if incident.restored_from == "memory":
        require(lost <= 2 * every + 1, f"{lost} steps lost, one of {every} is staged")


if __name__ == "__main__":
    import sys

    first, last = (int(part) for part in sys.argv[1].split(":"))
    for number in range(first, last):
        for each in KINDS:
            try:
                check(each, number)
            except AssertionError as error:
                print(f"{each} {number}: {error}")
