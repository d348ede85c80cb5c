"""Ends of workers: some are done and take their time, some have failed."""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs

from .harness import SECOND_NS, of, running

LINGERS = worker_protocol.Leaving(waits_for="the thread upload in send (hub.py:7)")


def test_a_worker_that_is_done_is_shown_to_leave_until_it_reports_a_step() -> None:
    harness = running()
    for message, leaves in (
        (worker_protocol.Leaving(), True),
        (worker_protocol.Pulse(), True),
        (worker_protocol.Progress(step=3), False),
    ):
        harness.from_worker(0, message)
        (beat,) = of(m.Heartbeat, harness.after(1))
        assert [worker.leaves for worker in beat.workers] == [leaves, False]


def test_of_workers_that_do_not_leave_each_node_names_one() -> None:
    harness = running()
    (note,) = of(m.NodeRemarked, harness.from_worker(1, LINGERS))
    assert note.shown
    assert note.text == (
        "rank 1 has run to its end and does not leave: it waits for the thread upload in send "
        "(hub.py:7)"
    )
    assert not of(m.NodeRemarked, harness.from_worker(0, LINGERS))


# -- errors -----------------------------------------------------------------------------------
STOP = m.StopWorkers(action_id=7, generation=1, save_grace_s=limits.SAVE_GRACE_S)


def failed(*, secondary: bool = False) -> worker_protocol.Failed:
    return worker_protocol.Failed(
        error_type="ValueError", message="bad", traceback="", secondary=secondary, at_ns=5
    )


def test_an_error_is_reported_before_its_process_has_ended_and_once() -> None:
    harness = running()
    harness.from_worker(0, worker_protocol.Progress(step=3))
    out = harness.from_worker(0, failed())
    (report,) = of(m.WorkerExited, out)
    assert (report.exit.code, report.exit.step, report.exit.at_ns) == (1, 3, 5)
    assert [w.step for beat in of(m.Heartbeat, out) for w in beat.workers] == [3]
    assert not of(m.WorkerExited, harness.worker_ends(0, code=1))


def test_a_worker_that_cleans_up_after_its_error_has_the_grace_of_a_save() -> None:
    harness = running()
    harness.from_worker(0, failed())
    kills = of(commands.Kill, harness.receive(STOP))
    assert [(kill.rank, kill.signal) for kill in kills] == [(1, 9)]
    assert not of(m.GroupStopped, harness.worker_ends(1, signal=9))
    harness.now_ns = int(limits.SAVE_GRACE_S * SECOND_NS)
    kills = of(commands.Kill, harness.give(inputs.ClockTick()))
    assert [(kill.rank, kill.signal) for kill in kills] == [(0, 9)]
    (stopped,) = of(m.GroupStopped, harness.worker_ends(0, signal=9))
    cause = next(exit for exit in stopped.exits if exit.rank == 0)
    assert (cause.code, cause.signal, cause.by_us, cause.error_type) == (
        1,
        None,
        False,
        "ValueError",
    )


def test_a_worker_that_lost_a_peer_has_no_such_grace() -> None:
    harness = running()
    harness.from_worker(0, worker_protocol.PhaseChanged(phase="save"))
    harness.from_worker(1, failed(secondary=True))
    kills = of(commands.Kill, harness.receive(STOP))
    assert [kill.rank for kill in kills] == [1]
    kills = of(commands.Kill, harness.from_worker(0, failed(secondary=True)))
    assert [kill.rank for kill in kills] == [0]
    harness.worker_ends(1, signal=9)
    (stopped,) = of(m.GroupStopped, harness.worker_ends(0, signal=9))
    assert [(exit.code, exit.secondary) for exit in stopped.exits] == [(1, True), (1, True)]
