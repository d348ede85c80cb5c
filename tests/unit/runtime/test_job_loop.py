"""The loop without IO: what is ready when, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_to_mapping
from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    ActionUnknown,
    ControllerStarted,
    FromNode,
    JobSubmitted,
    NodeLost,
    Tick,
)
from holdfast.orchestrator.core.state import TimerName
from holdfast.orchestrator.protocol.facts import NodeFacts
from holdfast.orchestrator.protocol.messages import (
    CopyStep,
    Heartbeat,
    NodeJoined,
    NodeRemarked,
    StepCopied,
)
from holdfast.orchestrator.runtime.job_loop import JobLoop, Ready

from .harness import make_job

JOB = make_job()
SUBMITTED = JobSubmitted(job_id="id", spec=job_to_mapping(JOB), spec_directory="/")
NODES = ("a", "b")


def joined(node: str) -> FromNode:
    facts = NodeFacts(hostname=node, address=node, data_port=1, slots=2)
    return FromNode(node, NodeJoined(facts=facts, offered_port=4000))


def take(loop: JobLoop, now_ns: int) -> Ready:
    ready = loop.ready(now_ns)
    loop.advance()
    return ready


def launched() -> tuple[JobLoop, Ready]:
    """Job loop at one second: two nodes have joined, and their launch is decided."""
    loop = JobLoop.restore(JOB, None, [])
    loop.start(SECOND_NS, SUBMITTED, (), None)
    (request,) = take(loop, SECOND_NS).actions
    assert isinstance(request, RequestNodes)
    loop.feed(SECOND_NS, ActionSucceeded(action_id=request.action_id, nodes=NODES))
    for node in NODES:
        loop.feed(SECOND_NS, joined(node))
    return loop, take(loop, SECOND_NS)


def test_records_come_in_order_of_arrival_with_their_times_and_before_the_actions() -> None:
    loop = JobLoop.restore(JOB, None, [])
    assert loop.start(1, SUBMITTED, (), None) == 1
    loop.feed(3, joined("a"))
    loop.feed(2, joined("b"))
    ready = loop.ready(9)
    submitted, started, *rest = [record.event for record in ready.records]
    assert isinstance(submitted, JobSubmitted) and isinstance(started, ControllerStarted)
    assert rest == [joined("a"), joined("b")]
    assert [record.now_ns for record in ready.records] == [1, 1, 3, 3], "time never goes back"
    assert ready.actions and ready.must_commit and loop.idle


def test_nothing_more_is_ready_before_the_last_records_are_durable() -> None:
    loop = JobLoop.restore(JOB, None, [])
    loop.start(1, SUBMITTED, (), None)
    loop.ready(1)
    loop.feed(2, joined("a"))
    with pytest.raises(AssertionError, match="not durable"):
        loop.ready(2)
    loop.advance()
    assert len(loop.ready(2).records) == 1


def test_heartbeats_are_no_records_and_need_no_commit() -> None:
    loop, _ = launched()
    loop.feed(2 * SECOND_NS, FromNode("a", Heartbeat(generation=1)))
    assert take(loop, 2 * SECOND_NS) == ((), (), False, ())
    (seen,) = [one for one in loop.view(3 * SECOND_NS).nodes if one.name == "a"]
    assert seen.heartbeat_age_s == 1.0


def test_copies_that_stop_are_in_the_journal() -> None:
    loop, ready = launched()
    for action in ready.actions:
        succeeded = ActionSucceeded(action_id=action.action_id, generation=action.generation)
        loop.feed(2 * SECOND_NS, succeeded)
    take(loop, 2 * SECOND_NS)
    failed = StepCopied(generation=1, wanted=0, step=0, staged_step=0, detail="a: timed out")
    loop.feed(3 * SECOND_NS, FromNode("b", failed))
    ready = take(loop, 3 * SECOND_NS)
    assert ready.records == () and ready.orders
    for second in (14, 15):
        wanted = ready.orders[0].message
        assert isinstance(wanted, CopyStep)
        late = msgspec.structs.replace(failed, wanted=wanted.step)
        loop.feed(second * SECOND_NS, FromNode("b", late))
        ready = take(loop, second * SECOND_NS)
        facts = [one.event.fact for one in ready.records if isinstance(one.event, FromNode)]
        remarks = [fact for fact in facts if isinstance(fact, NodeRemarked)]
        assert len(remarks) == (second == 14)
        assert all("no copy of all nodes for 11 s" in one.text for one in remarks)


def test_heartbeats_that_wait_count_from_their_arrival() -> None:
    """A commit takes longer than the heartbeat timeout, and one node is silent meanwhile."""
    loop, _ = launched()
    loop.ready(SECOND_NS)
    for second in range(2, 30):
        loop.feed(second * SECOND_NS, FromNode("a", Heartbeat(generation=0)))
    loop.advance()
    events = [record.event for record in take(loop, 30 * SECOND_NS).records]
    assert [event.node for event in events if isinstance(event, NodeLost)] == ["b"]


@pytest.mark.parametrize("timer", ["request", "gather"])
def test_a_timer_fires_one_tick_also_if_it_stays_armed(timer: TimerName) -> None:
    loop, _ = launched()
    loop.state.timers[timer] = loop.state.now_ns + 5
    assert loop.next_deadline_ns() == SECOND_NS + 5
    ready = take(loop, SECOND_NS + 5)
    assert [record.event for record in ready.records] == [Tick()]
    due = loop.next_deadline_ns()
    assert due is None or due > SECOND_NS + 5


def test_the_next_controller_continues_from_records_or_from_a_snapshot() -> None:
    loop, decided = launched()
    again = JobLoop.restore(JOB, loop.snapshot(), [])
    assert again.state == loop.state and again.last_ns == SECOND_NS
    assert again.start(2 * SECOND_NS, SUBMITTED, (), NODES) == 2
    events = [record.event for record in take(again, 2 * SECOND_NS).records]
    assert events[0] == ControllerStarted(incarnation=2, nodes=NODES)
    launches = [one.action_id for one in decided.actions if isinstance(one, LaunchGroup)]
    assert [one.action_id for one in events if isinstance(one, ActionUnknown)] == launches
    view, known = again.view(3 * SECOND_NS, live=False), loop.view(3 * SECOND_NS, live=False)
    assert (view.generation, view.state) == (known.generation, known.state)
