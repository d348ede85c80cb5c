"""Requests for nodes, promised nodes, and whether a shrink waits for a replacement."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes
from holdfast.orchestrator.core.context import seconds
from holdfast.orchestrator.core.events import ActionSucceeded, ControllerStarted

from .harness import Transcript, spec


def started(took_s: float, *names: str, **document: object) -> Transcript:
    """A running job whose nodes took `took_s` from promise to join."""
    job = Transcript(spec(**document))
    job.submit()
    job.succeed(RequestNodes)
    job.wait(took_s)
    job.join(*(names or ("a", "b")))
    job.succeed(LaunchGroup)
    job.step(0)
    return job


def lose(job: Transcript, *, granted: bool = True) -> None:
    """One of two nodes is lost; a replacement is promised."""
    job.lose("b")
    if granted:
        job.succeed(RequestNodes)
    job.stopped("a", 5)


def test_a_replacement_that_cannot_join_in_time_is_not_awaited() -> None:
    job = started(4.0)
    lose(job)
    launch = job.one(LaunchGroup)
    assert launch.node == "a"
    assert job.state.incidents[-1].decision == (
        "shrink from 2 to 1 node, from memory after step 5, without waiting for a replacement: "
        "a node takes 4.0 s or more to start"
    )


def test_the_answer_to_a_request_for_nodes_is_awaited() -> None:
    job = started(4.0)
    lose(job, granted=False)
    assert not job.of(LaunchGroup)
    job.succeed(RequestNodes)
    assert job.one(LaunchGroup).node == "a"


def test_the_start_time_of_the_backend_counts_more_than_measured_ones() -> None:
    """On one machine the first nodes wait for the node launcher; the next ones are forked."""
    job = started(4.0)
    lose(job, granted=False)
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("c",), start_s=0.0))
    assert not job.of(LaunchGroup)
    job.wait(0.5)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_a_replacement_that_can_join_in_time_is_awaited() -> None:
    job = started(1.5)
    lose(job)
    assert not job.of(LaunchGroup)
    job.wait(1.5)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]
    assert "without waiting" not in job.state.incidents[-1].decision


def test_a_node_promised_earlier_may_join_in_time() -> None:
    job = started(4.0, "a", "b", "c", nodes={"min": 1, "max": 2, "spares": 1})
    job.lose("c")
    job.succeed(RequestNodes)
    job.wait(2.5)
    job.lose("b")
    job.stopped("a", 5)
    assert not job.of(LaunchGroup), "it is expected in 1.5 s"
    job.wait(1.4)
    job.join("d")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "d"]


def test_a_node_that_is_long_overdue_is_not_awaited() -> None:
    job = started(1.0, "a", "b", "c", nodes={"min": 1, "max": 3}, workers=1, shard=1)
    job.lose("c")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    job.stopped("b", 5)
    job.wait(2.1)
    assert {launch.node for launch in job.of(LaunchGroup)} == {"a", "b"}
    job.succeed(LaunchGroup)
    job.step(6)
    job.wait(20)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 7)
    assert job.one(LaunchGroup).node == "a", "a pod that is pending for 20 s may be unschedulable"


def test_a_job_that_cannot_shrink_waits_for_a_replacement() -> None:
    job = started(4.0, nodes={"min": 2, "max": 2})
    lose(job)
    assert not job.of(LaunchGroup)
    assert job.state.phase == "recovering"
    job.wait(4.0)
    assert job.state.phase == "pending"
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_only_the_last_start_durations_count() -> None:
    """The first nodes of a job pull images."""
    job = started(60.0)
    job.state.start_durations_ns.extend([seconds(1.0)] * 8)
    lose(job)
    job.join("c")
    assert len(job.state.start_durations_ns) == 8
    job.succeed(LaunchGroup)
    assert max(job.state.start_durations_ns) <= seconds(1.0)


def test_the_start_of_a_node_that_a_new_controller_finds_is_not_measured() -> None:
    job = started(4.0)
    job.lose("b")
    job.apply(ControllerStarted(incarnation=2, nodes=("a", "c")))
    job.join("a", "c", generation=0)
    assert [round(ns / 1e9) for ns in job.state.start_durations_ns] == [4, 4]
    assert job.state.pending_nodes == []


def test_a_replay_of_a_shrink_gives_the_same_state() -> None:
    job = started(4.0)
    lose(job)
    assert job.replayed().state == job.state


def test_the_start_time_of_the_backend_is_enough_without_measured_ones() -> None:
    job = Transcript().started()
    job.state.start_durations_ns.clear()
    lose(job, granted=False)
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("c",), start_s=30.0))
    assert job.one(LaunchGroup).node == "a"


def test_a_node_that_does_not_join_within_the_backends_limit_is_released() -> None:
    job = Transcript(spec(nodes={"min": 2, "max": 2}))
    job.submit()
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    promised = ActionSucceeded(
        action_id=request.action_id,
        nodes=(
            "a",
            "b",
        ),
        start_limit_s=1800.0,
    )
    job.apply(promised)
    job.join("a")
    job.wait(1000.0)
    assert not job.of(ReleaseNode), "the image of b may be large"
    job.wait(801.0)
    assert [release.node for release in job.of(ReleaseNode)] == ["b"]
    assert job.of(RequestNodes)[-1].count == 1


def test_nodes_that_end_before_they_join_are_requested_with_growing_pauses() -> None:
    job = Transcript(spec(nodes={"min": 2, "max": 2}))
    job.submit()
    job.succeed(RequestNodes)
    pauses, released = [], []
    for number in range(12):
        actions = job.lose(f"early-{number}", detail="OOMKilled")
        released += [one.node for one in actions if isinstance(one, ReleaseNode)]
        began = job.state.now_ns
        while not any(isinstance(one, RequestNodes) for one in job.wait(0.5)):
            assert job.state.now_ns < began + seconds(400)
        pauses.append(round((job.state.now_ns - began) / 1e9))
        job.succeed(RequestNodes)
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert pauses[-1] == 300
    assert "early-11 ended before it joined: OOMKilled" in job.state.reason.text
    # The logs of the last ones can still be read.
    assert released == [f"early-{number}" for number in range(10)]


def test_a_node_that_joins_ends_the_pauses() -> None:
    job = Transcript(spec(nodes={"min": 2, "max": 2}))
    job.submit()
    job.succeed(RequestNodes)
    for number in range(3):
        job.lose(f"early-{number}", detail="OOMKilled")
        job.wait(60.0)
        job.succeed(RequestNodes)
    job.join("a")
    assert (job.state.num_failed_starts, job.state.failed_starts) == (0, {})
    assert "ended before" not in job.state.reason.text
