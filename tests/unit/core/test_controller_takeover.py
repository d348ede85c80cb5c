"""A controller that comes back, and nodes that do."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes, StopGroup
from holdfast.orchestrator.core.events import ActionUnknown, ControllerStarted, NodeJoined

from .harness import Transcript, facts


def _rejoin(story: Transcript, node: str, step: int = 30) -> list[object]:
    ranks = tuple(seat.rank for seat in story.state.launch_actions[node].seats)
    staged = story.inventory(node, step)
    return list(
        story.tell(
            NodeJoined(
                node=node,
                facts=facts(node),
                generation=story.state.generation,
                ranks=ranks,
                staged=staged,
            )
        )
    )


def test_a_new_controller_adopts_what_runs_without_disturbing_it() -> None:
    story = Transcript().started()
    story.controller = story.replayed()
    assert not story.tell(ControllerStarted(incarnation=2))
    assert not _rejoin(story, "a")
    assert not _rejoin(story, "b")
    assert not story.wait(60)
    assert story.state.phase == "running"


def test_a_node_that_does_not_come_back_to_a_new_controller_is_lost() -> None:
    story = Transcript().started()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    story.wait(8.1)
    assert story.one(ReleaseNode).node == "b"
    assert story.one(StopGroup).node == "a"
    story.all_stopped(30)
    assert story.state.incidents[0].culprit_node == "b"


def test_a_launch_that_may_not_have_been_heard_is_said_again() -> None:
    story = Transcript()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a", "b")
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    assert not story.fresh, "a runs it already"
    story.tell(NodeJoined(node="b", facts=facts("b"), offered_port=1))
    assert story.one(LaunchGroup).node == "b"


def test_a_stop_that_may_not_have_been_heard_is_said_again() -> None:
    story = Transcript().started()
    story.exits(0, signal=9)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    assert story.one(StopGroup).node == "a"
    _rejoin(story, "b")
    story.all_stopped(30)
    assert len(story.of(LaunchGroup)) == 2


def test_nodes_that_the_backend_has_are_not_asked_for_again() -> None:
    story = Transcript()
    story.submit()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, nodes=("x", "y")))
    story.tell(ActionUnknown(action_id=1))
    assert not story.wait(30)
    story.join("x", "y")
    assert len(story.of(LaunchGroup)) == 2


def test_a_node_that_ended_meanwhile_is_lost_at_once() -> None:
    story = Transcript().started()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, nodes=("a",)))
    assert story.one(ReleaseNode).node == "b"
    assert story.one(StopGroup).node == "a"


def test_a_stale_node_is_told_to_stop_and_used_when_it_has() -> None:
    story = Transcript()
    story.submit()
    story.succeed(RequestNodes)
    story.state.generation = 4
    story.tell(NodeJoined(node="a", facts=facts("a"), generation=2, ranks=(0, 1)))
    stop = story.one(StopGroup)
    assert (stop.node, stop.generation) == ("a", 2)
    story.join("b")
    assert not story.of(LaunchGroup)
    from holdfast.orchestrator.core.events import GroupStopped

    story.tell(GroupStopped(action_id=stop.action_id, node="a", generation=2, offered_port=7))
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "b"]


def test_a_node_that_was_given_up_is_not_taken_back() -> None:
    story = Transcript().started()
    story.lose("b", "silent")
    story.succeed(ReleaseNode)
    story.tell(NodeJoined(node="b", facts=facts("b"), generation=1, ranks=(2, 3)))
    assert story.one(ReleaseNode).node == "b"
    assert "b" not in story.state.nodes


def test_a_release_that_failed_is_tried_again() -> None:
    story = Transcript().started()
    story.lose("b")
    story.fail(story.one(ReleaseNode), "the backend does not answer")
    story.wait(5.1)
    assert story.one(ReleaseNode).node == "b"


def test_a_promised_node_that_never_comes_is_given_back() -> None:
    from holdfast.orchestrator.core.events import ActionSucceeded

    story = Transcript()
    story.submit()
    request = story.one(RequestNodes)
    story.tell(ActionSucceeded(action_id=request.action_id, nodes=("x", "y")))
    story.join("x")
    story.wait(6)
    story.succeed(LaunchGroup)
    story.wait(295)
    assert [action.node for action in story.of(ReleaseNode)] == ["y"]
    assert story.one(RequestNodes).count == 1


def test_a_member_that_lost_its_workers_breaks_the_generation() -> None:
    story = Transcript().started()
    story.tell(NodeJoined(node="b", facts=facts("b"), offered_port=9))
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(4)
    assert story.state.incidents[0].culprit_node == "b"


def test_a_replay_gives_the_same_state() -> None:
    story = Transcript().started()
    story.exits(2, signal=9, step=3)
    story.stopped("a", 3)
    story.lose("b")
    story.wait(1)
    story.commit(3)
    assert story.replayed().state == story.state
