"""A job that has too few nodes waits for as long as its spec allows."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import FinishJob, LaunchGroup, RequestNodes
from holdfast.orchestrator.core.events import ResumeRequested, SuspendRequested

from .harness import Transcript, spec

PAIR = {"min": 2, "max": 2}
MINUTE = {"capacityTimeoutSeconds": 60}


def waiting() -> Transcript:
    """One node of two has come, and for the other there is no room."""
    story = Transcript(spec(PAIR, recovery=MINUTE))
    story.submit()
    story.fail(story.one(RequestNodes))
    story.join("a")
    story.wait(5.1)
    story.fail(story.one(RequestNodes), "a third of the cluster is on fire")
    return story


def test_a_job_that_never_gets_its_nodes_fails_and_says_why() -> None:
    story = waiting()
    story.wait(54)
    assert story.state.phase == "pending" and not story.of(FinishJob)
    story.fail(story.one(RequestNodes), "a third of the cluster is on fire")
    story.wait(1.1)
    finish = story.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "capacity")
    assert finish.reason.text == (
        "recovery.capacityTimeoutSeconds: waited 60 s for nodes: 1 usable, at least 2 needed, "
        "0 pending; a third of the cluster is on fire"
    )
    assert not story.of(LaunchGroup)


def test_without_a_limit_the_job_waits() -> None:
    story = Transcript(spec(PAIR))
    story.submit()
    story.fail(story.one(RequestNodes))
    story.wait(100_000)
    assert story.state.phase == "pending"


def test_nodes_that_come_in_time_end_the_wait() -> None:
    story = waiting()
    story.wait(50)
    story.join("b")
    story.succeed(LaunchGroup)
    story.step(0)
    story.wait(100)
    assert story.state.phase == "running"


def test_nodes_that_are_gathered_end_the_wait_and_a_loss_begins_another() -> None:
    story = Transcript(spec({"min": 2, "max": 3}, recovery=MINUTE))
    story.submit()
    story.succeed(RequestNodes)
    story.join("a")
    story.wait(58)
    story.join("b")
    story.wait(4)
    assert story.state.phase == "pending" and not story.of(LaunchGroup), "a third may yet come"
    due_ns = story.controller.next_deadline_ns()
    assert due_ns is not None and due_ns > story.now, "nothing is due again and again"
    story.lose("b")
    story.wait(55)
    assert story.state.phase == "pending" and not story.of(FinishJob)


def test_a_job_that_trained_and_waits_in_vain_keeps_its_newest_state() -> None:
    story = Transcript(spec(PAIR, recovery=MINUTE)).started()
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 5)
    assert story.state.phase == "pending"
    story.wait(61)
    assert story.state.phase == "finishing"
    story.commit(5)
    finish = story.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "capacity")
    assert [committed.step for committed in story.state.catalog.committed] == [5]


def test_a_suspended_job_is_not_waiting() -> None:
    story = waiting()
    story.tell(SuspendRequested())
    story.wait(1000)
    assert story.state.phase == "suspended"
    story.tell(ResumeRequested())
    story.wait(59)
    assert story.state.phase == "pending", "the wait begins anew"
