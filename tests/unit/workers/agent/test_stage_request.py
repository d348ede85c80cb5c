"""A step that the controller wants staged by all workers of a node, and its answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands

from .harness import AgentHarness, of, request_buffers

ORDER = m.Stage(action_id=9, generation=1, step=12, hold=True)


@pytest.fixture
def bench() -> AgentHarness:
    """Its workers have done step 11."""
    bench = AgentHarness()
    bench.launch(1)
    request_buffers(bench)
    finish(bench, 11)
    return bench


def finish(bench: AgentHarness, step: int, ranks: Iterable[int] = (0, 1)) -> tuple[object, ...]:
    out: tuple[object, ...] = ()
    for rank in ranks:
        out += bench.says(rank, worker_protocol.Progress(step=step))
    return out


def answers(outputs: Iterable[object]) -> list[tuple[int, bool, str]]:
    return [(one.action_id, one.ok, one.detail) for one in of(m.ShardStaged, outputs)]


def test_every_worker_is_told_and_the_answer_comes_when_all_have_staged_it(
    bench: AgentHarness,
) -> None:
    out = bench.tell(ORDER)
    told = [(one.rank, one.message) for one in of(commands.ToRank, out)]
    assert told == [(rank, worker_protocol.StageAt(step=12, hold=True)) for rank in (0, 1)]
    assert not answers(out)
    assert answers(bench.stage(12)) == [(9, True, "")]
    assert not answers(finish(bench, 12)), "it is answered once"


def test_another_step_is_no_answer(bench: AgentHarness) -> None:
    bench.tell(ORDER)
    assert not answers(bench.stage(11))


def test_a_worker_that_is_past_the_step_is_named(bench: AgentHarness) -> None:
    finish(bench, 12, ranks=[1])
    assert answers(bench.tell(ORDER)) == [(9, False, "rank 1 was past step 12, or at its end")]


def test_a_worker_that_read_it_too_late_is_named(bench: AgentHarness) -> None:
    bench.tell(ORDER)
    assert answers(finish(bench, 12, ranks=[0])) == [
        (9, False, "rank 0 was past step 12, or at its end")
    ]


@pytest.mark.parametrize("how", ["finished", "ended"])
def test_a_worker_that_does_not_train_any_more_is_named(bench: AgentHarness, how: str) -> None:
    bench.tell(ORDER)
    finished = how == "finished"
    out = bench.says(1, worker_protocol.Finished(step=11)) if finished else bench.ends(1, code=0)
    assert answers(out) == [(9, False, "rank 1 was past step 12, or at its end")]


def test_a_stop_that_comes_first_answers_it(bench: AgentHarness) -> None:
    bench.tell(ORDER)
    out = bench.tell(m.StopWorkers(action_id=10, generation=1))
    assert answers(out) == [(9, False, "it was stopped before")]


@pytest.mark.parametrize("generation", [0, 2])
def test_a_generation_that_does_not_run_here_is_not_told(
    bench: AgentHarness, generation: int
) -> None:
    out = bench.tell(m.Stage(action_id=9, generation=generation, step=12))
    assert answers(out) == [(9, False, f"generation {generation} does not run here")]
    assert not of(commands.ToRank, out)


def test_who_does_not_wait_for_an_answer_takes_none_from_others(bench: AgentHarness) -> None:
    bench.tell(ORDER)
    out = bench.tell(m.Stage(action_id=0, generation=1, step=14))
    assert [one.message for one in of(commands.ToRank, out)] == [
        worker_protocol.StageAt(step=14)
    ] * 2
    assert answers(bench.stage(12)) == [(9, True, "")]
    assert not answers(bench.stage(14))
    assert not answers(bench.tell(m.Stage(action_id=0, generation=2, step=14)))
