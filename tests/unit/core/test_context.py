"""The context of one step, and the frame that the controller gives to every event."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.actions import Reason, RequestNodes
from holdfast.orchestrator.core.context import MAX_NOTES, StepContext, recovery_of, seconds
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.events import FromNode, JobSubmitted, Tick
from holdfast.orchestrator.core.transitions import IllegalTransition
from holdfast.orchestrator.protocol.messages import Heartbeat

from .harness import SECOND, Transcript, spec


def context() -> StepContext:
    job = Transcript().started()
    return StepContext(job.state, job.now_ns)


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    ctx = context()
    before = copy.copy(ctx.state)
    with pytest.raises(IllegalTransition, match="running -> suspended"):
        ctx.move("suspended", "suspend", "no")
    assert ctx.state == before
    ctx.move("running", "hang", "the same phase, for another reason")
    assert ctx.state.reason.code == "hang"


def test_a_job_on_hold_has_the_text_as_its_reason_unless_there_is_a_shorter_one() -> None:
    ctx = context()
    ctx.hold("a checkpoint was not read")
    assert (ctx.state.intent, ctx.state.intent_reason) == ("suspend", "a checkpoint was not read")
    ctx.hold("a checkpoint was not read; two ways on", "not read")
    assert ctx.state.intent_reason == "not read"


def test_a_job_is_submitted_once_and_first() -> None:
    job = Transcript()
    assert not job.controller.submitted and job.controller.next_deadline_ns() is None
    with pytest.raises(AssertionError, match="JobSubmitted"):
        job.controller.step(1, Tick())
    job.submit()
    assert job.controller.submitted
    with pytest.raises(AssertionError, match="once"):
        job.apply(JobSubmitted(job_id="x", spec=job.document, spec_directory="."))


def test_heartbeats_are_no_events_of_the_controller() -> None:
    job = Transcript().started()
    before = copy.copy(job.state)
    later = job.now_ns + SECOND
    assert job.controller.step(later, FromNode("a", Heartbeat(generation=1))) == ()
    assert job.state == before
    assert Controller().step(1, FromNode("a", Heartbeat(generation=1))) == ()


def test_notes_are_bounded() -> None:
    ctx = context()
    for number in range(MAX_NOTES + 3):
        ctx.note(str(number))
    assert [text for _at, text in ctx.state.notes] == [str(n) for n in range(3, MAX_NOTES + 3)]


def test_a_timer_is_due_at_its_time_and_can_be_armed_once() -> None:
    ctx = context()
    assert not ctx.due("grow") and ctx.left_s("grow") is None
    ctx.arm("grow", 2.0)
    ctx.arm_once("grow", 9.0)
    assert ctx.left_s("grow") == 2.0
    ctx.now_ns += 2 * SECOND - 1
    assert not ctx.due("grow")
    ctx.now_ns += 1
    assert ctx.due("grow") and ctx.left_s("grow") == 0.0
    ctx.now_ns += SECOND
    assert ctx.left_s("grow") == 0.0
    ctx.disarm("grow", "preempt")
    assert not ctx.due("grow")


def test_actions_have_ids_and_the_generation() -> None:
    ctx = context()
    reason = Reason("capacity", "because")
    first = ctx.emit(RequestNodes, reason, count=1)
    second = ctx.emit(RequestNodes, reason, 0, count=2)
    assert second == first + 1
    assert [(a.action_id, a.generation) for a in ctx.actions] == [(first, 1), (second, 0)]
    assert ctx.state.inflight[first] is ctx.actions[0]


@pytest.mark.parametrize(("value", "ns"), [(0.5, SECOND // 2), (2, 2 * SECOND)])
def test_seconds_become_nanoseconds(value: Any, ns: int) -> None:
    assert seconds(value) == ns


@pytest.mark.parametrize(
    ("nodes", "interval_s", "timeout_s"), [(1000, 0.5, 3.0), (1200, 0.6, 3.0), (4096, 2.048, 6.144)]
)
def test_the_heartbeats_of_a_large_job_are_further_apart_and_its_nodes_are_lost_later(
    nodes: int, interval_s: float, timeout_s: float
) -> None:
    job = job_from_mapping(spec({"min": 1, "max": nodes}))
    recovery = recovery_of(job)
    assert recovery.heartbeat_interval_s == interval_s
    assert recovery.heartbeat_timeout_s == pytest.approx(timeout_s)
    assert (recovery is job.spec.recovery) == (nodes == 1000)
