"""A new controller continues a job, nodes reconnect to it, and results of actions are lost."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.orchestrator.core.actions import (
    CleanStorage,
    InspectGroup,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    ActionUnknown,
    ControllerStarted,
    FromNode,
    HangSuspected,
    StragglerDetected,
    SuspendRequested,
    Tick,
)
from holdfast.orchestrator.protocol.facts import Exit
from holdfast.orchestrator.protocol.messages import (
    GroupInspected,
    GroupStopped,
    NodeJoined,
    WorkerExited,
)

from .harness import SECOND, Transcript, facts, spec, stack


def _rejoin(job: Transcript, node: str, step: int = 30) -> list[object]:
    ranks = tuple(seat.rank for seat in job.state.group.launches[node].seats)
    staged = job.inventory(node, step)
    return list(
        job.apply(
            FromNode(
                node,
                NodeJoined(
                    facts=facts(node), generation=job.state.generation, ranks=ranks, staged=staged
                ),
            )
        )
    )


def test_a_new_controller_adopts_running_nodes_without_any_action() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    assert not job.apply(ControllerStarted(incarnation=2))
    assert not _rejoin(job, "a")
    assert not _rejoin(job, "b")
    assert not job.wait(60)
    assert job.state.phase == "running"


def test_a_node_that_does_not_reconnect_to_a_new_controller_is_lost() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    _rejoin(job, "a")
    job.wait(15.1)
    assert job.one(ReleaseNode).node == "b"
    assert job.one(StopGroup).node == "a"
    job.all_stopped(30)
    assert job.state.incidents[0].culprit_node == "b"


def test_a_launch_that_may_not_have_arrived_is_sent_again() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    _rejoin(job, "a")
    assert not job.fresh, "a runs the generation already"
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), offered_port=1)))
    assert job.one(LaunchGroup).node == "b"


def test_a_stop_that_may_not_have_arrived_is_sent_again() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    _rejoin(job, "a")
    assert job.one(StopGroup).node == "a"
    _rejoin(job, "b")
    job.all_stopped(30)
    assert len(job.of(LaunchGroup)) == 2


def test_nodes_that_the_backend_has_are_not_requested_again() -> None:
    job = Transcript()
    job.submit()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("x", "y")))
    job.apply(ActionUnknown(action_id=1))
    assert not job.wait(30)
    job.join("x", "y")
    assert len(job.of(LaunchGroup)) == 2


def test_a_node_that_ended_without_a_controller_is_lost_at_once() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("a",)))
    assert job.one(ReleaseNode).node == "b"
    assert job.one(StopGroup).node == "a"


def test_a_node_of_an_old_generation_is_stopped_and_then_used() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.state.generation = 4
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), generation=2, ranks=(0, 1))))
    stop = job.one(StopGroup)
    assert (stop.node, stop.generation) == ("a", 2)
    job.join("b")
    assert not job.of(LaunchGroup)
    job.apply(FromNode("a", GroupStopped(action_id=stop.action_id, generation=2, offered_port=7)))
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b"]


def test_a_released_node_that_connects_is_released_again() -> None:
    job = Transcript().started()
    job.lose("b", "silent")
    job.succeed(ReleaseNode)
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), generation=1, ranks=(2, 3))))
    assert job.one(ReleaseNode).node == "b"
    assert "b" not in job.state.nodes


def test_a_failed_release_is_tried_again() -> None:
    job = Transcript().started()
    job.lose("b")
    job.fail(job.one(ReleaseNode), "the backend does not answer")
    job.wait(5.1)
    assert job.one(ReleaseNode).node == "b"


def test_a_promised_node_that_never_joins_is_released() -> None:
    job = Transcript()
    job.submit()
    request = job.one(RequestNodes)
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("x", "y")))
    job.join("x")
    job.wait(6)
    job.succeed(LaunchGroup)
    job.wait(295)
    assert [action.node for action in job.of(ReleaseNode)] == ["y"]
    assert job.one(RequestNodes).count == 1


def test_a_member_that_rejoins_without_its_workers_interrupts_the_generation() -> None:
    job = Transcript().started()
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), offered_port=9)))
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(4)
    assert job.state.incidents[0].culprit_node == "b"


def test_a_replay_gives_the_same_state() -> None:
    job = Transcript().started()
    job.exits(2, signal=9, step=3)
    job.stopped("a", 3)
    job.lose("b")
    job.wait(1)
    job.commit(3)
    assert job.replayed().state == job.state


def test_the_first_controller_requests_its_nodes_once() -> None:
    job = Transcript()
    job.submit()
    job.apply(ControllerStarted(incarnation=1, nodes=()))
    assert not job.fresh and job.state.expected_nodes == 2
    assert job.state.incarnation == 1


def test_a_request_for_nodes_without_a_result_is_repeated_after_the_time_to_reconnect() -> None:
    job = Transcript()
    job.submit()
    job.apply(ActionUnknown(action_id=job.one(RequestNodes).action_id))
    assert not job.fresh and job.state.expected_nodes == 0
    job.wait(14.9)
    assert not job.of(RequestNodes)
    job.wait(0.2)
    assert job.one(RequestNodes).count == 2


def test_a_launch_without_a_result_is_not_in_flight_any_more() -> None:
    job = Transcript().started(step=None)
    job.exits(0, signal=9)
    job.all_stopped(3)
    launch = job.of(LaunchGroup)[0]
    assert not job.apply(ActionUnknown(action_id=launch.action_id))
    assert launch.action_id not in job.state.inflight
    assert launch.node in job.state.group.launching, "it is sent again after a timeout"
    assert "request" not in job.state.timers


def test_a_release_without_a_result_is_repeated() -> None:
    job = Transcript().started()
    job.lose("b")
    release = job.one(ReleaseNode)
    job.apply(ActionUnknown(action_id=release.action_id))
    assert job.state.notes[-1][1] == "b was not released (result unknown); trying again"
    job.wait(5.0)
    assert job.one(ReleaseNode).node == "b"
    job.succeed(ReleaseNode)
    assert not job.wait(4.9), "it has succeeded"


def test_a_stop_of_an_older_generation_does_not_count_for_the_current_one() -> None:
    job = Transcript().started(step=3)
    job.exits(0, signal=9)
    assert job.state.stop is not None
    late = FromNode("a", GroupStopped(action_id=job.state.stop.waiting["a"], generation=1))
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    job.exits(0, signal=9)
    assert job.state.generation == 2
    job.apply(late)
    assert job.state.stop is not None and list(job.state.stop.waiting) == ["a", "b"]
    assert job.state.nodes["a"].generation == 2 and job.state.nodes["a"].staged != ()


def test_a_stop_that_is_reported_twice_changes_nothing() -> None:
    job = Transcript().started(step=3)
    job.exits(0, signal=9)
    assert job.state.stop is not None
    stopped = GroupStopped(action_id=job.state.stop.waiting["a"], generation=1)
    job.apply(FromNode("a", stopped))
    assert stopped.action_id not in job.state.inflight
    again = msgspec.structs.replace(stopped, staged=job.inventory("a", 9))
    assert not job.apply(FromNode("a", again))
    assert list(job.state.stop.waiting) == ["b"] and job.state.nodes["a"].staged == ()


def test_a_stop_that_was_not_requested_changes_nothing() -> None:
    job = Transcript().started(step=3)
    assert not job.apply(FromNode("a", GroupStopped(action_id=99, generation=1)))
    assert job.state.nodes["a"].generation == 1 and job.state.phase == "running"


def test_a_new_controller_continues_the_last_write() -> None:
    storage = {"storage": {"finalTimeoutSeconds": 30}}
    job = Transcript(spec(checkpoint=storage)).started(step=3)
    job.apply(SuspendRequested())
    job.all_stopped(3)
    job.wait(25)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    for node in ("a", "b"):
        job.apply(FromNode(node, NodeJoined(facts=facts(node), staged=job.inventory(node, 3))))
    job.wait(1.0)
    assert job.one(PersistStep).step == 3
    job.wait(28.0)
    assert job.state.phase == "suspending", "the time starts again"
    job.wait(1.1)
    assert job.state.phase == "suspended"


def test_a_new_controller_only_awaits_what_exists() -> None:
    job = Transcript().started(step=3)
    job.wait(301)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("a", "b")))
    assert list(job.state.timers) == ["rejoin"]
    assert job.controller.next_deadline_ns() == job.now_ns + 15 * SECOND


def test_a_new_controller_releases_a_node_again_that_the_backend_still_has() -> None:
    job = Transcript().started()
    job.lose("b")
    job.succeed(ReleaseNode)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("a", "b")))
    release = job.one(ReleaseNode)
    assert (release.node, release.reason.code) == ("b", "controller-restart")
    assert release.reason.text == "b was released: lost (gone): gone"
    assert not job.state.supply.promised


def test_a_new_controller_repeats_a_release_without_a_result() -> None:
    job = Transcript().started()
    job.lose("b")
    reason = job.one(ReleaseNode).reason
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert job.one(ReleaseNode).reason == reason


def test_a_new_controller_gives_a_stop_and_a_launch_the_time_to_reconnect() -> None:
    stopping, launching = Transcript().started(), Transcript().started(step=None)
    stopping.exits(0, signal=9)
    launching.exits(0, signal=9)
    launching.all_stopped(3)
    launching.wait(15.1)
    assert "launch-again" in launching.state.timers
    for job in (stopping, launching):
        job.controller = job.replayed()
        job.apply(ControllerStarted(incarnation=2))
    assert stopping.state.timers["stop"] == stopping.now_ns + 25 * SECOND
    assert launching.state.timers["launch"] == launching.now_ns + 15 * SECOND
    assert "launch-again" not in launching.state.timers


def test_all_nodes_that_reconnect_end_the_wait_for_them() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    _rejoin(job, "a")
    assert "rejoin" in job.state.timers
    job.lose("b")
    assert "rejoin" not in job.state.timers, "no other node is awaited"


def test_the_events_of_an_old_generation_change_nothing() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(3)
    assert not job.apply(FromNode("b", WorkerExited(generation=1, exit=Exit(rank=2, signal=9))))
    assert job.state.notes[-1][1] == "b: ignored the end of a worker of generation 1"
    assert job.state.group.exits == {} and job.state.stop is None


def test_a_straggler_is_noted() -> None:
    job = Transcript().started()
    assert not job.apply(StragglerDetected(generation=1, node="b", evidence="0.9 s a step"))
    assert job.state.notes[-1][1] == "b is slow: 0.9 s a step"


def test_a_deletion_that_failed_is_noted_and_not_repeated() -> None:
    job = Transcript(spec(checkpoint={"retention": {"keepLast": 1}})).started()
    job.commit(9)
    job.commit(19)
    job.fail(job.one(CleanStorage), "access denied")
    assert job.state.notes[-1][1] == "storage was not cleaned: access denied"
    assert [known.step for known in job.state.catalog.committed] == [19]


def test_time_never_goes_back() -> None:
    job = Transcript().started()
    before = job.state.now_ns
    job.controller.step(before - SECOND, Tick())
    assert job.state.now_ns == before


def _in_condition(condition: str) -> tuple[Transcript, int]:
    """A job with a spare, and the generation that a late event names."""
    nodes = {"min": 2, "max": 2, "spares": 1}
    job = Transcript(spec(nodes, workers=1, recovery={"replaceStragglers": True}))
    job.started("a", "b", "c")
    if condition != "runs":
        job.exits(0, signal=9)
    if condition == "stopped":
        for node in ("a", "b", "c"):
            job.lose(node)
    if condition == "old":
        job.all_stopped(9)
        job.succeed(LaunchGroup)
    return job, 1


CONDITIONS = ["runs", "stopping", "stopped", "old"]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_suspicion_counts_only_for_workers_that_run(condition: str) -> None:
    job, generation = _in_condition(condition)
    before, reason = list(job.state.notes), job.state.reason
    job.apply(HangSuspected(generation=generation, evidence="rank 1 is late"))
    if condition != "runs":
        assert not job.fresh and job.state.notes == before and job.state.reason == reason
        return
    assert [(one.node, one.reason.text) for one in job.of(InspectGroup)] == [
        ("a", "rank 1 is late"), ("b", "rank 1 is late"),
    ]  # fmt: skip
    assert job.state.reason.text == job.state.notes[-1][1] == "no progress: rank 1 is late"


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_inspection_counts_only_for_workers_that_run(condition: str) -> None:
    job, generation = _in_condition(condition)
    event = FromNode("b", GroupInspected(generation=generation, stacks=(stack(1),)))
    job.apply(event)
    assert list(job.state.inspected) == ([1] if condition == "runs" else [])


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_slow_node_is_replaced_only_while_its_workers_run(condition: str) -> None:
    job, generation = _in_condition(condition)
    job.apply(StragglerDetected(generation=generation, node="b", evidence="0.9 s a step"))
    assert (job.now_ns, "b is slow: 0.9 s a step") in job.state.notes
    slow = [node.name for node in job.state.nodes.values() if node.slow]
    assert slow == (["b"] if condition == "runs" else [])
