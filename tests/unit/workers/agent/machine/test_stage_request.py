"""A step that the controller requests from all workers of a node, and the answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands

from .harness import AgentHarness, of, running

REQUEST = m.Stage(action_id=9, generation=1, step=12, hold=True)


@pytest.fixture
def harness() -> AgentHarness:
    """Agent whose workers have finished step 11."""
    harness = running(buffers=True)
    finish(harness, 11)
    return harness


def finish(harness: AgentHarness, step: int, ranks: Iterable[int] = (0, 1)) -> tuple[object, ...]:
    out: tuple[object, ...] = ()
    for rank in ranks:
        out += harness.from_worker(rank, worker_protocol.Progress(step=step))
    return out


def answers(outputs: Iterable[object]) -> list[tuple[int, bool, str]]:
    return [(one.action_id, one.ok, one.detail) for one in of(m.ShardStaged, outputs)]


def test_every_worker_gets_the_request_and_the_answer_follows_when_all_have_staged_the_step(
    harness: AgentHarness,
) -> None:
    out = harness.receive(REQUEST)
    sent = [(one.rank, one.message) for one in of(commands.ToRank, out)]
    assert sent == [(rank, worker_protocol.StageAt(step=12, hold=True)) for rank in (0, 1)]
    assert not answers(out)
    assert answers(harness.stage(12)) == [(9, True, "")]
    assert not answers(finish(harness, 12)), "the request is answered once"


def test_staging_another_step_does_not_answer_the_request(harness: AgentHarness) -> None:
    harness.receive(REQUEST)
    assert not answers(harness.stage(11))


def test_a_worker_that_is_past_the_step_is_named(harness: AgentHarness) -> None:
    finish(harness, 12, ranks=[1])
    assert answers(harness.receive(REQUEST)) == [
        (9, False, "rank 1 was past 13 steps, or at its end")
    ]


def test_a_worker_that_reads_the_request_too_late_is_named(harness: AgentHarness) -> None:
    harness.receive(REQUEST)
    assert answers(finish(harness, 12, ranks=[0])) == [
        (9, False, "rank 0 was past 13 steps, or at its end")
    ]


@pytest.mark.parametrize("how", ["finished", "ended"])
def test_a_worker_that_has_finished_or_ended_is_named(harness: AgentHarness, how: str) -> None:
    harness.receive(REQUEST)
    finished = how == "finished"
    out = (
        harness.from_worker(1, worker_protocol.Finished(step=11))
        if finished
        else harness.worker_ends(1, code=0)
    )
    assert answers(out) == [(9, False, "rank 1 was past 13 steps, or at its end")]


def test_a_stop_answers_the_request(harness: AgentHarness) -> None:
    harness.receive(REQUEST)
    out = harness.receive(m.StopWorkers(action_id=10, generation=1))
    assert answers(out) == [(9, False, "it was stopped before")]


@pytest.mark.parametrize("generation", [0, 2])
def test_a_request_for_another_generation_is_not_sent_to_workers(
    harness: AgentHarness, generation: int
) -> None:
    out = harness.receive(m.Stage(action_id=9, generation=generation, step=12))
    assert answers(out) == [(9, False, f"generation {generation} does not run here")]
    assert not of(commands.ToRank, out)


def test_a_request_without_answer_leaves_the_answer_of_another_one_pending(
    harness: AgentHarness,
) -> None:
    harness.receive(REQUEST)
    out = harness.receive(m.Stage(action_id=0, generation=1, step=14))
    assert [one.message for one in of(commands.ToRank, out)] == [
        worker_protocol.StageAt(step=14)
    ] * 2
    assert answers(harness.stage(12)) == [(9, True, "")]
    assert not answers(harness.stage(14))
    assert not answers(harness.receive(m.Stage(action_id=0, generation=2, step=14)))


def test_a_second_request_answers_the_first_and_both_steps_are_staged(
    harness: AgentHarness,
) -> None:
    harness.receive(REQUEST)
    out = harness.receive(m.Stage(action_id=11, generation=1, step=14, hold=True))
    assert answers(out) == [(9, False, "the state after 15 steps was requested after it")]
    assert [one.message.step for one in of(commands.ToRank, out)] == [14, 14]
    assert not answers(harness.stage(12))
    assert answers(harness.stage(14)) == [(11, True, "")]
