"""A new controller continues a job, and nodes reconnect to it."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes, StopGroup
from holdfast.orchestrator.core.events import ActionUnknown, ControllerStarted, NodeJoined

from .harness import Transcript, facts


def _rejoin(job: Transcript, node: str, step: int = 30) -> list[object]:
    ranks = tuple(seat.rank for seat in job.state.launch_actions[node].seats)
    staged = job.inventory(node, step)
    return list(
        job.apply(
            NodeJoined(
                node=node,
                facts=facts(node),
                generation=job.state.generation,
                ranks=ranks,
                staged=staged,
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
    job.wait(8.1)
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
    job.apply(NodeJoined(node="b", facts=facts("b"), offered_port=1))
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
    job.apply(NodeJoined(node="a", facts=facts("a"), generation=2, ranks=(0, 1)))
    stop = job.one(StopGroup)
    assert (stop.node, stop.generation) == ("a", 2)
    job.join("b")
    assert not job.of(LaunchGroup)
    from holdfast.orchestrator.core.events import GroupStopped

    job.apply(GroupStopped(action_id=stop.action_id, node="a", generation=2, offered_port=7))
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b"]


def test_a_released_node_that_connects_is_released_again() -> None:
    job = Transcript().started()
    job.lose("b", "silent")
    job.succeed(ReleaseNode)
    job.apply(NodeJoined(node="b", facts=facts("b"), generation=1, ranks=(2, 3)))
    assert job.one(ReleaseNode).node == "b"
    assert "b" not in job.state.nodes


def test_a_failed_release_is_tried_again() -> None:
    job = Transcript().started()
    job.lose("b")
    job.fail(job.one(ReleaseNode), "the backend does not answer")
    job.wait(5.1)
    assert job.one(ReleaseNode).node == "b"


def test_a_promised_node_that_never_joins_is_released() -> None:
    from holdfast.orchestrator.core.events import ActionSucceeded

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
    job.apply(NodeJoined(node="b", facts=facts("b"), offered_port=9))
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
