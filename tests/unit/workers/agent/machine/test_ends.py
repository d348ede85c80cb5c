"""How workers end: those that are done and take their time, and those that have failed."""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import inputs

from .harness import SECOND_NS, AgentHarness, of

LINGERS = worker_protocol.Leaving(waits_for="the thread upload in send (hub.py:7)")


def test_a_worker_that_is_done_is_shown_to_leave_until_it_reports_a_step() -> None:
    harness = AgentHarness()
    harness.launch()
    for message, leaves in (
        (worker_protocol.Leaving(), True),
        (worker_protocol.Pulse(), True),
        (worker_protocol.Progress(step=3), False),
    ):
        harness.from_worker(0, message)
        harness.now_ns += SECOND_NS
        (beat,) = of(m.Heartbeat, harness.give(inputs.ClockTick()))
        assert [worker.leaves for worker in beat.workers] == [leaves, False]


def test_of_workers_that_do_not_leave_each_node_names_one() -> None:
    harness = AgentHarness()
    harness.launch()
    (note,) = of(m.AgentNote, harness.from_worker(1, LINGERS))
    assert note.shown
    assert note.text == (
        "rank 1 has run to its end and does not leave: it waits for the thread upload in send "
        "(hub.py:7)"
    )
    assert not of(m.AgentNote, harness.from_worker(0, LINGERS))
