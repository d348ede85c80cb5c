"""Invariants after every step: a state that contradicts itself is rejected with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.core import invariants
from holdfast.orchestrator.core.actions import Reason
from holdfast.orchestrator.core.events import FromNode, Tick
from holdfast.orchestrator.core.roster import PendingNode, Promises
from holdfast.orchestrator.core.state import JobState, PendingCheckpoint, PendingStop, Supply
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import StandbysReported

from .harness import Transcript, spec


def _with_generation(generation: int) -> Callable[[JobState], None]:
    def change(state: JobState) -> None:
        group = state.group
        group.membership = msgspec.structs.replace(group.membership, generation=generation)

    return change


def _world(state: JobState) -> None:
    state.group.membership = msgspec.structs.replace(state.group.membership, mesh=Mesh(replicate=3))


def _shard(shard: int, generation: int = 1) -> Callable[[JobState], None]:
    def change(state: JobState) -> None:
        file = ShardFile(11, generation, shard, 2, "s", 1, "c")
        pending = PendingCheckpoint(11, generation, Mesh(shard=2), {shard: file})
        state.catalog.pending[11, generation] = pending

    return change


def _launching(name: str, generation: int = 1) -> Callable[[JobState], None]:
    def change(state: JobState) -> None:
        action = msgspec.structs.replace(state.group.launches["a"], generation=generation)
        state.inflight[99], state.group.launching[name] = action, 99

    return change


def _set(**fields: Any) -> Callable[[JobState], None]:
    def change(state: JobState) -> None:
        for name, value in fields.items():
            setattr(state if hasattr(state, name) else state.group, name, value)

    return change


def _future_node(state: JobState) -> None:
    state.nodes.change("a", generation=2)


def _same_seats(state: JobState) -> None:
    state.group.launches["b"] = state.group.launches["a"]


def _committed_twice(state: JobState) -> None:
    state.catalog.committed = state.catalog.committed * 2


STOP = PendingStop("failure", Reason("hang", ""), 0, False, 0.0)
HELD = {"active": False, "needs_placement": False}
BROKEN: list[tuple[Callable[[JobState], None], str]] = [
    (_set(members=("a", "a")), "a node is a member twice"),
    (_with_generation(2), "the membership is of generation 2"),
    (_set(members=("a",)), "2 nodes wanted"),
    (_world, "a world of 3 on 2 nodes"),
    (_same_seats, "ranks are not a bijection"),
    (_set(supply=Supply(promised=Promises([PendingNode("b", 0)]))), "b has joined and is pending"),
    (_set(supply=Supply(released={"b": "lost"})), "b has joined and was released"),
    (_future_node, "a runs a future generation"),
    (_launching("x"), "x is launching and is not a member"),
    (_launching("a", 2), "a is being launched for generation 2"),
    (_set(needs_placement=True), "a generation runs while the next one is placed"),
    (_set(active=False, stop=STOP, phase="recovering"), "a stop without a generation"),
    (_set(phase="pending"), "workers run in phase pending"),
    (_set(phase="suspended"), "workers run in phase suspended"),
    (_set(active=False), "no generation runs in phase running"),
    (_set(stop=STOP), "no generation runs in phase running"),
    (_set(active=False, phase="starting"), "no generation runs in phase starting"),
    (_set(**HELD, phase="pending"), "a pending job waits for no generation"),
    (_set(**HELD, phase="failed"), "a terminal phase without an outcome"),
    (_set(phase="failed", outcome="failed", stop=STOP), "a job that has ended is still busy"),
    (
        _set(active=False, needs_placement=True, phase="failed", outcome="failed"),
        "a job that has ended is still busy",
    ),
    (_committed_twice, "committed twice"),
    (_shard(0, generation=2), "a shard of generation 2, which is in the future"),
    (_shard(2), "shard 2 of 2"),
]


def training() -> JobState:
    job = Transcript(spec()).started()
    job.commit(9)
    return job.state


@pytest.mark.parametrize(("change", "text"), BROKEN, ids=[text for _change, text in BROKEN])
def test_a_state_that_contradicts_itself_is_refused(
    change: Callable[[JobState], None], text: str
) -> None:
    state = training()
    invariants.check(state)
    change(state)
    with pytest.raises(invariants.Broken, match=text):
        invariants.check(state)


@pytest.mark.parametrize(
    "change",
    [
        _shard(1),
        _launching("a"),
        _set(active=False, phase="recovering"),
        _set(active=False, needs_placement=True, phase="pending"),
        _set(**HELD, phase="suspended"),
        _set(**HELD, phase="failed", outcome="failed"),
        _set(active=False, members=("a",), needs_placement=True, phase="recovering"),
    ],
)
def test_a_state_that_can_occur_is_accepted(change: Callable[[JobState], None]) -> None:
    state = training()
    change(state)
    invariants.check(state)


def test_an_event_checks_the_node_that_it_names_and_what_does_not_grow_with_the_job() -> None:
    job = Transcript(spec()).started()
    node = job.state.nodes["a"]
    job.state.nodes.change("a", generation=2)
    job.controller.step(job.now_ns, FromNode("b", StandbysReported(ready=True)))
    with pytest.raises(invariants.Broken, match="a runs a future generation"):
        job.controller.step(job.now_ns, FromNode("a", StandbysReported(ready=True)))
    job.state.nodes["a"] = node
    job.commit(9)
    _committed_twice(job.state)
    with pytest.raises(invariants.Broken, match="committed twice"):
        job.controller.step(job.now_ns, Tick())


def test_a_launch_checks_the_whole_state() -> None:
    job = Transcript(spec()).started()
    job.exits(0, signal=9)
    job.stopped("a", 3)
    job.state.supply.released["a"] = "lost"
    with pytest.raises(invariants.Broken, match="a has joined and was released"):
        job.stopped("b", 3)
