"""A new generation with edited code (`holdfast again`)."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StageStep, StopGroup
from holdfast.orchestrator.core.events import AgainRequested, ResumeRequested, SuspendRequested

from .harness import Transcript, spec

CODE = "a" * 64
RARELY = {"memory": {"everySteps": 100}}


def test_workers_are_stopped_and_started_on_the_same_nodes() -> None:
    job = Transcript().started()
    job.apply(AgainRequested(by="ann"))
    assert [stop.reason.code for stop in job.of(StopGroup)] == ["new-code"] * 2
    assert job.state.phase == "recovering"
    job.all_stopped(33)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b"]
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 33
    assert not job.of(RequestNodes)
    job.step(34)
    assert job.state.phase == "running"
    incident = job.state.incidents[-1]
    assert (incident.purpose, incident.failure_class) == ("new-code", None)
    assert job.state.ledger.restarts == {}
    assert job.replayed().state == job.state


def test_it_does_not_wait_until_a_step_is_staged() -> None:
    job = Transcript(spec(checkpoint=RARELY)).started()
    job.wait(10)
    job.apply(AgainRequested())
    assert len(job.of(StopGroup)) == 2 and not job.of(StageStep)


def test_the_launch_names_the_new_code_and_an_empty_one_is_that_of_the_image() -> None:
    job = Transcript().started()
    job.apply(AgainRequested(code=CODE))
    job.all_stopped(5)
    assert {launch.code for launch in job.of(LaunchGroup)} == {CODE}
    assert job.state.job.spec.code == CODE
    job.step(6)
    job.apply(AgainRequested())
    job.all_stopped(7)
    assert {launch.code for launch in job.of(LaunchGroup)} == {CODE}
    job.step(8)
    job.apply(AgainRequested(code=""))
    job.all_stopped(9)
    assert {launch.code for launch in job.of(LaunchGroup)} == {""}
    assert job.state.job.spec.code is None


def test_code_that_hangs_at_its_start_is_replaced_before_its_first_step() -> None:
    job = Transcript().started(step=None)
    job.apply(AgainRequested())
    assert len(job.of(StopGroup)) == 2


def test_a_request_during_a_recovery_needs_no_second_stop() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.apply(AgainRequested(code=CODE))
    job.all_stopped(5)
    assert {launch.code for launch in job.of(LaunchGroup)} == {CODE}
    job.step(6)
    assert not job.of(StopGroup) and not job.state.new_code


@pytest.mark.parametrize("missed", ["rejoins", "is silent"])
def test_a_node_that_missed_its_launch_gets_the_code_with_the_next_one(missed: str) -> None:
    job = Transcript().started()
    job.apply(AgainRequested(code=CODE))
    job.all_stopped(5)
    first = {launch.node: launch for launch in job.of(LaunchGroup)}
    if missed == "rejoins":
        job.join("b")
    else:
        job.wait(60)
    sent = job.last(LaunchGroup)
    assert sent.action_id > first["b"].action_id and sent.code == CODE
    again = {"action_id": first[sent.node].action_id, "reason": first[sent.node].reason}
    assert msgspec.structs.replace(sent, **again) == first[sent.node], "else it is the same"


def test_a_suspended_job_has_the_new_code_when_it_is_resumed() -> None:
    job = Transcript().started()
    job.apply(SuspendRequested())
    job.all_stopped(33)
    job.commit(33)
    job.apply(AgainRequested(code=CODE))
    assert job.state.phase == "suspended"
    job.apply(ResumeRequested())
    job.succeed(RequestNodes)
    job.join("c", "d")
    assert {launch.code for launch in job.of(LaunchGroup)} == {CODE}


@pytest.mark.parametrize("again", [False, True])
def test_an_error_of_the_old_code_is_not_held_against_the_new_one(again: bool) -> None:
    job = Transcript().started()
    error = {"code": 1, "error_type": "ValueError", "error_message": "x", "traceback": "at 1"}
    job.exits(0, **error)
    job.all_stopped(5)
    if again:
        job.apply(AgainRequested())
        job.all_stopped(5)
    job.exits(0, **error)
    job.all_stopped(5)
    assert (job.state.termination_reason is None) == again
