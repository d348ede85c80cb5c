"""A planned stop of a script that asks for notices: it saves, and no SIGTERM interrupts it."""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands

from .harness import AgentHarness, of, running

STOP = m.StopWorkers(action_id=7, generation=1, grace_s=20.0, after_step=12)


def training(*, wanted_by: tuple[int, ...] = (0, 1), step: int = 5) -> AgentHarness:
    harness = running()
    for rank in range(2):
        if rank in wanted_by:
            harness.from_worker(rank, worker_protocol.StopNoticeWanted())
        harness.from_worker(rank, worker_protocol.Reported(step=step))
    return harness


def test_workers_that_asked_get_a_notice_and_their_exit_is_of_the_stop() -> None:
    harness = training()
    out = harness.receive(STOP)
    notice = worker_protocol.StopNotice(after_step=12, grace_s=20.0)
    assert [(one.rank, one.message) for one in of(commands.ToRank, out)] == [
        (0, notice),
        (1, notice),
    ]
    assert not of(commands.Kill, out)
    harness.worker_ends(0, code=0)
    out = harness.after(20)
    assert [(one.rank, one.signal) for one in of(commands.Kill, out)] == [(1, 9)]
    (stopped,) = of(m.GroupStopped, harness.worker_ends(1, signal=9))
    assert all(exit.by_us for exit in stopped.exits)


def test_a_worker_that_did_not_ask_gets_sigterm() -> None:
    out = training(wanted_by=(0,)).receive(STOP)
    assert [one.rank for one in of(commands.ToRank, out)] == [0]
    assert [(one.rank, one.signal) for one in of(commands.Kill, out)] == [(1, 15)]


def test_without_time_for_a_step_all_get_sigterm() -> None:
    for harness, stop in (
        (training(), m.StopWorkers(action_id=7, generation=1, grace_s=2.0)),
        (training(step=12), STOP),
    ):
        out = harness.receive(stop)
        assert [one.signal for one in of(commands.Kill, out)] == [15, 15]
        assert not of(commands.ToRank, out)
