"""A shrink waits for a replacement only if the job's nodes have come that fast before."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes
from holdfast.orchestrator.core.context import seconds
from holdfast.orchestrator.core.events import ActionSucceeded, ControllerStarted

from .harness import Transcript, spec


def started(took_s: float, *names: str, **document: object) -> Transcript:
    """Trains on nodes that took `took_s` from promise to arrival."""
    story = Transcript(spec(**document))
    story.submit()
    story.succeed(RequestNodes)
    story.wait(took_s)
    story.join(*(names or ("a", "b")))
    story.succeed(LaunchGroup)
    story.step(0)
    return story


def lose(story: Transcript, *, granted: bool = True) -> None:
    """One of two nodes is lost; a replacement is on its way."""
    story.lose("b")
    if granted:
        story.succeed(RequestNodes)
    story.stopped("a", 5)


def test_a_replacement_that_cannot_be_there_in_time_is_not_waited_for() -> None:
    story = started(4.0)
    lose(story)
    launch = story.one(LaunchGroup)
    assert launch.node == "a"
    assert story.state.incidents[-1].decision == (
        "shrink from 2 to 1 node, from memory after step 5, without waiting for a replacement: "
        "a node takes 4.0 s or more to start"
    )


def test_while_the_backend_has_not_promised_one_yet_its_word_is_waited_for() -> None:
    story = started(4.0)
    lose(story, granted=False)
    assert not story.of(LaunchGroup)
    story.succeed(RequestNodes)
    assert story.one(LaunchGroup).node == "a"


def test_what_the_backend_says_counts_more_than_what_was_seen() -> None:
    """On one machine the first nodes wait for their host to be up; the next ones are forked."""
    story = started(4.0)
    lose(story, granted=False)
    (request,) = [a for a in story.state.inflight.values() if isinstance(a, RequestNodes)]
    story.tell(ActionSucceeded(action_id=request.action_id, nodes=("c",), start_s=0.0))
    assert not story.of(LaunchGroup)
    story.wait(0.5)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_one_that_can_be_there_in_time_is_waited_for() -> None:
    story = started(1.5)
    lose(story)
    assert not story.of(LaunchGroup)
    story.wait(1.5)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
    assert "without waiting" not in story.state.incidents[-1].decision


def test_one_that_was_on_its_way_already_may_still_come_in_time() -> None:
    story = started(4.0, "a", "b", "c", nodes={"min": 1, "max": 2, "spares": 1})
    story.lose("c")
    story.succeed(RequestNodes)
    story.wait(2.5)
    story.lose("b")
    story.stopped("a", 5)
    assert not story.of(LaunchGroup), "it is due in 1.5 s"
    story.wait(1.4)
    story.join("d")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "d"]


def test_one_that_is_long_overdue_is_not_waited_for() -> None:
    story = started(1.0, "a", "b", "c", nodes={"min": 1, "max": 3}, workers=1, shard=1)
    story.lose("c")
    story.succeed(RequestNodes)
    story.stopped("a", 5)
    story.stopped("b", 5)
    story.wait(2.1)
    assert {launch.node for launch in story.of(LaunchGroup)} == {"a", "b"}
    story.succeed(LaunchGroup)
    story.step(6)
    story.wait(20)
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 7)
    assert story.one(LaunchGroup).node == "a", "the pod of 20 s ago may never get a place"


def test_where_the_job_cannot_shrink_it_waits_as_long_as_it_takes() -> None:
    story = started(4.0, nodes={"min": 2, "max": 2})
    lose(story)
    assert not story.of(LaunchGroup)
    assert story.state.phase == "recovering"
    story.wait(4.0)
    assert story.state.phase == "pending"
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_only_the_last_starts_count() -> None:
    """The first nodes of a job pull images."""
    story = started(60.0)
    story.state.start_durations_ns.extend([seconds(1.0)] * 8)
    lose(story)
    story.join("c")
    assert len(story.state.start_durations_ns) == 8
    story.succeed(LaunchGroup)
    assert max(story.state.start_durations_ns) <= seconds(1.0)


def test_a_node_that_a_new_controller_finds_teaches_nothing() -> None:
    story = started(4.0)
    story.lose("b")
    story.tell(ControllerStarted(incarnation=2, nodes=("a", "c")))
    story.join("a", "c", generation=0)
    assert [round(ns / 1e9) for ns in story.state.start_durations_ns] == [4, 4]
    assert story.state.pending_nodes == []


def test_a_replay_decides_the_same() -> None:
    story = started(4.0)
    lose(story)
    assert story.replayed().state == story.state


def test_the_word_of_a_backend_is_enough_when_no_node_was_seen_to_start() -> None:
    story = Transcript().started()
    story.state.start_durations_ns.clear()
    lose(story, granted=False)
    (request,) = [a for a in story.state.inflight.values() if isinstance(a, RequestNodes)]
    story.tell(ActionSucceeded(action_id=request.action_id, nodes=("c",), start_s=30.0))
    assert story.one(LaunchGroup).node == "a"


def test_a_node_that_does_not_come_is_given_back_when_the_backends_limit_is_over() -> None:
    story = Transcript(spec(nodes={"min": 2, "max": 2}))
    story.submit()
    (request,) = [a for a in story.state.inflight.values() if isinstance(a, RequestNodes)]
    promised = ActionSucceeded(
        action_id=request.action_id,
        nodes=(
            "a",
            "b",
        ),
        start_limit_s=1800.0,
    )
    story.tell(promised)
    story.join("a")
    story.wait(1000.0)
    assert not story.of(ReleaseNode), "the image of b may be large"
    story.wait(801.0)
    assert [release.node for release in story.of(ReleaseNode)] == ["b"]
    assert story.of(RequestNodes)[-1].count == 1


def test_nodes_that_end_before_they_join_are_asked_for_with_growing_pauses() -> None:
    story = Transcript(spec(nodes={"min": 2, "max": 2}))
    story.submit()
    story.succeed(RequestNodes)
    pauses, released = [], []
    for number in range(12):
        actions = story.lose(f"early-{number}", detail="OOMKilled")
        released += [one.node for one in actions if isinstance(one, ReleaseNode)]
        began = story.state.now_ns
        while not any(isinstance(one, RequestNodes) for one in story.wait(0.5)):
            assert story.state.now_ns < began + seconds(400)
        pauses.append(round((story.state.now_ns - began) / 1e9))
        story.succeed(RequestNodes)
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert pauses[-1] == 300
    assert "early-11 ended before it joined: OOMKilled" in story.state.reason.text
    # The logs of the last ones can still be read.
    assert released == [f"early-{number}" for number in range(10)]


def test_one_node_that_joins_ends_the_pauses() -> None:
    story = Transcript(spec(nodes={"min": 2, "max": 2}))
    story.submit()
    story.succeed(RequestNodes)
    for number in range(3):
        story.lose(f"early-{number}", detail="OOMKilled")
        story.wait(60.0)
        story.succeed(RequestNodes)
    story.join("a")
    assert (story.state.num_failed_starts, story.state.failed_starts) == (0, {})
    assert "ended before" not in story.state.reason.text
