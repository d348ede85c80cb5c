"""The agent passes the staging interval on to its workers and reports it."""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands

from .harness import AgentHarness, of, running


def shown(harness: AgentHarness) -> tuple[int, int]:
    (beat,) = of(m.Heartbeat, harness.after(1))
    return beat.stage_every_steps, beat.stage_from_step


def test_workers_are_forked_with_the_interval_of_their_launch() -> None:
    harness = AgentHarness()
    assert shown(harness) == (0, 0)
    out = harness.launch(1, stage_every_steps=4)
    assert [fork.stage_every_steps for fork in of(commands.Fork, out)] == [4, 4]
    assert shown(harness) == (4, 0)


def test_an_order_goes_to_every_worker_and_is_shown() -> None:
    harness = running(stage_every_steps=1)
    out = harness.receive(m.StageEvery(generation=1, every_steps=8, from_step=40))
    word = worker_protocol.SetStagingInterval(every_steps=8, from_step=40)
    assert [(o.rank, o.message) for o in of(commands.ToRank, out)] == [(0, word), (1, word)]
    assert shown(harness) == (8, 40)
    harness.launch(2, stage_every_steps=8)
    harness.worker_ends(0, signal=9)
    harness.worker_ends(1, signal=9)
    assert shown(harness) == (8, 0)


def test_an_order_for_another_generation_changes_nothing() -> None:
    harness = running(2, stage_every_steps=1)
    assert not harness.receive(m.StageEvery(generation=1, every_steps=8, from_step=40))
    assert shown(harness) == (1, 0)
