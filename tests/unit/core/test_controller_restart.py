"""Found by seeds 212, 283, 903 and 1656: what a controller that comes back got wrong."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes, StopGroup
from holdfast.orchestrator.core.events import ActionSucceeded, ControllerStarted
from tests.unit.core.harness import Transcript, spec


def test_a_launch_is_not_repeated_for_a_generation_that_is_being_stopped() -> None:
    """Seed 212: stop and launch were both unanswered when the controller died; when its patience
    ended it launched the old generation again, beside the new one."""
    story = Transcript()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a", "b")
    story.exits(0, signal=9)
    assert len(story.of(StopGroup)) == 2
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    story.wait(60)
    launched = [a for a in story.actions if isinstance(a, LaunchGroup)]
    assert [launch.generation for launch in launched] == [1, 1]


def test_a_promised_node_that_died_before_it_joined_is_given_back() -> None:
    """Seed 101: such nodes used up the room of the backend, and the job waited for ever."""
    story = Transcript(spec({"min": 2, "max": 2}))
    story.submit()
    request = story.one(RequestNodes)
    story.tell(ActionSucceeded(action_id=request.action_id, nodes=("x", "y")))
    story.wait(301)
    assert sorted(action.node for action in story.of(ReleaseNode)) == ["x", "y"]
    assert story.one(RequestNodes).count == 2


def test_a_request_whose_result_was_lost_is_settled_by_what_the_backend_has() -> None:
    story = Transcript(spec({"min": 2, "max": 2}))
    story.submit()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, nodes=("x",)))
    assert story.one(RequestNodes).count == 1, "x is on its way, one more is missing"
