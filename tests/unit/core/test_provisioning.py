"""Requests for nodes, promised nodes, and whether a shrink waits for a replacement."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import (
    AnyAction,
    LaunchGroup,
    Reason,
    ReleaseNode,
    RequestNodes,
)
from holdfast.orchestrator.core.context import seconds
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    CancelRequested,
    ControllerStarted,
    FromNode,
    ResizeRequested,
    SuspendRequested,
    Tick,
)
from holdfast.orchestrator.core.roster import PendingNode
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.messages import NodeJoined, PreemptionNoticed

from .harness import Transcript, facts, spec


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
        "shrink from 2 to 1 node, from memory after 6 steps, without waiting for a replacement: "
        "a node takes 4.0 s or more to start"
    )


def test_the_answer_to_a_request_for_nodes_is_awaited() -> None:
    job = started(4.0)
    lose(job, granted=False)
    assert not job.of(LaunchGroup)
    job.succeed(RequestNodes)
    assert job.one(LaunchGroup).node == "a"


def test_the_start_time_of_the_backend_counts_more_than_measured_ones() -> None:
    """The first nodes of one machine wait for the node launcher; the next ones are forked."""
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
    job.state.supply.start_durations_ns.extend([seconds(1.0)] * 8)
    lose(job)
    job.join("c")
    assert len(job.state.supply.start_durations_ns) == 8
    job.succeed(LaunchGroup)
    assert max(job.state.supply.start_durations_ns) <= seconds(1.0)


def test_the_start_of_a_node_that_a_new_controller_finds_is_not_measured() -> None:
    job = started(4.0)
    job.lose("b")
    job.apply(ControllerStarted(incarnation=2, nodes=("a", "c")))
    job.join("a", "c", generation=0)
    assert [round(ns / 1e9) for ns in job.state.supply.start_durations_ns] == [4, 4]
    assert not job.state.supply.promised


def test_a_replay_of_a_shrink_gives_the_same_state() -> None:
    job = started(4.0)
    lose(job)
    assert job.replayed().state == job.state


def test_the_start_time_of_the_backend_is_enough_without_measured_ones() -> None:
    job = Transcript().started()
    job.state.supply.start_durations_ns.clear()
    lose(job, granted=False)
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("c",), start_s=30.0))
    assert job.one(LaunchGroup).node == "a"


def test_a_node_that_does_not_join_within_the_backends_limit_is_released() -> None:
    job = Transcript(spec(nodes={"min": 2, "max": 2}))
    job.submit()
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    promised = ActionSucceeded(action_id=request.action_id, nodes=("a", "b"), start_limit_s=1800.0)
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
    assert (job.state.supply.num_failed_starts, job.state.supply.failed_starts) == (0, {})
    assert "ended before" not in job.state.reason.text


def promise(job: Transcript, *names: str, **more: Any) -> list[AnyAction]:
    """The backend promises nodes."""
    (request,) = [a for a in job.state.inflight.values() if isinstance(a, RequestNodes)]
    return job.apply(ActionSucceeded(action_id=request.action_id, nodes=names, **more))


def test_a_replacement_expected_exactly_at_the_end_of_the_wait_is_awaited() -> None:
    job = started(2.0)
    lose(job)
    assert not job.of(LaunchGroup)
    job.wait(1.9)
    assert not job.of(LaunchGroup)
    job.wait(0.1)
    assert job.one(LaunchGroup).node == "a"


@pytest.mark.parametrize(("after_s", "awaited"), [(3.0, True), (3.1, False)])
def test_a_node_is_overdue_after_the_longest_start_and_the_replacement_wait(
    after_s: float, awaited: bool
) -> None:
    job = started(1.0, "a", "b", "c", nodes={"min": 1, "max": 2, "spares": 1})
    job.lose("c")
    job.succeed(RequestNodes)
    job.wait(after_s)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 5)
    assert (not job.of(LaunchGroup)) == awaited


def test_a_request_says_how_many_nodes_have_joined_and_are_pending() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, shard="auto"))
    job.submit()
    request = job.one(RequestNodes)
    assert request.reason == Reason("submitted", "0 of 3 nodes have joined, 0 are pending")
    promise(job, "a", "b", "c")
    job.join("a", "b", "c")
    job.succeed(LaunchGroup)
    job.step(0)
    job.lose("c")
    assert job.one(RequestNodes).reason == Reason(
        "capacity", "2 of 3 nodes have joined, 0 are pending"
    )
    job.lose("b")
    assert not job.of(RequestNodes) or job.one(RequestNodes).count == 1


def test_fewer_promised_nodes_than_requested_are_requested_again() -> None:
    job = Transcript()
    job.submit()
    promise(job, "a")
    again = job.one(RequestNodes)
    assert (again.count, again.reason.text) == (1, "0 of 2 nodes have joined, 1 are pending")


def test_a_promise_of_nodes_that_are_known_counts_once() -> None:
    job = Transcript(spec({"min": 4, "max": 4}, shard="auto"))
    job.submit()
    promise(job, "a", "a", "b")
    job.join("b")
    job.lose("c")
    job.wait(1.0)
    promise(job, "b", "c", "d")
    assert [one.name for one in job.state.supply.promised] == ["a", "d"]


def test_a_promised_node_without_a_name_stands_for_any_node() -> None:
    job = Transcript()
    job.submit()
    promise(job)
    assert [one.name for one in job.state.supply.promised] == [None, None]
    job.wait(1)
    job.join("a")
    assert len(job.state.supply.promised) == 1
    assert job.state.supply.start_durations_ns == [seconds(1.0)]
    job.step(0)
    job.succeed(LaunchGroup)
    job.wait(298.9)
    assert len(job.state.supply.promised) == 1
    job.wait(0.1)
    assert not job.state.supply.promised and not job.of(ReleaseNode)
    assert job.state.notes[-1][1] == "a node did not join within 300 s"


def test_promises_without_a_name_cannot_be_recalled() -> None:
    job = Transcript()
    job.submit()
    promise(job)
    job.apply(SuspendRequested())
    assert not job.of(ReleaseNode) and len(job.state.supply.promised) == 2
    assert job.state.phase == "suspended"


def test_a_named_promise_is_fulfilled_before_one_without_a_name() -> None:
    job = Transcript()
    job.submit()
    job.state.supply.promised.append(PendingNode(None, 0))
    job.state.supply.promised.append(PendingNode("a", job.now_ns))
    job.join("a")
    assert [one.name for one in job.state.supply.promised] == [None]


def test_a_promised_node_that_does_not_join_is_released_with_the_reason_and_others_later() -> None:
    job = Transcript(spec({"min": 3, "max": 3}, shard="auto"))
    job.submit()
    promise(job, "x", start_limit_s=100.0)
    job.wait(40)
    promise(job, "y", start_limit_s=100.0)
    job.wait(59.9)
    assert not job.of(ReleaseNode)
    job.wait(0.1)
    assert job.one_reason(ReleaseNode) == "x did not join within 100 s"
    assert job.one(ReleaseNode).reason.code == "capacity"
    assert (job.now_ns, "x did not join within 100 s") in job.state.notes
    job.wait(39.9)
    assert not job.of(ReleaseNode)
    job.wait(0.1)
    assert job.one(ReleaseNode).node == "y"


def test_recalled_promises_have_a_reason() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, shard="auto"))
    job.submit()
    promise(job, "a", "b", "c")
    job.apply(ResizeRequested(nodes=2))
    assert job.one(ReleaseNode).reason == Reason(
        "resize", "c has not joined, and only 2 nodes are wanted now"
    )
    job.apply(SuspendRequested())
    assert [release.reason for release in job.of(ReleaseNode)] == [
        Reason("suspend", f"{name} has not joined, and the job needs no nodes") for name in "ba"
    ]


def test_a_job_that_ends_requests_and_keeps_no_nodes() -> None:
    job = Transcript(spec({"min": 2, "max": 2, "spares": 1})).started("a", "b")
    job.apply(CancelRequested())
    assert not job.wait(5)
    job.lose("b")
    assert not job.of(RequestNodes)
    done = Transcript(spec({"min": 2, "max": 2})).started()
    for rank in range(4):
        done.exits(rank, code=0, step=9)
    assert done.state.phase == "finishing"
    done.lose("b")
    assert not done.of(RequestNodes)


def test_a_refused_request_is_repeated_after_a_pause() -> None:
    job = Transcript()
    job.submit()
    job.fail(job.one(RequestNodes), "quota")
    assert job.state.supply.denied and job.state.supply.denial == "quota"
    assert job.state.notes[-1][1] == "a request for 2 more nodes was refused: quota"
    job.wait(4.9)
    assert not job.of(RequestNodes)
    job.wait(0.1)
    assert job.one(RequestNodes).count == 2
    assert job.state.reason.text == ("waiting for nodes (0 of 1 ready, 0 starting); quota"), (
        "the new request promises nothing"
    )
    job.succeed(RequestNodes)
    job.join("a")
    assert not job.state.supply.denied


def test_surplus_nodes_are_released_after_the_first_step_the_newest_first() -> None:
    job = Transcript(spec({"min": 1, "max": 3, "spares": 1}, shard="auto"))
    job.started("a", "b", "c", "d", step=None)
    job.apply(ResizeRequested(nodes=2))
    assert not job.of(ReleaseNode), "the generation still starts"
    job.step(0)
    job.all_stopped(3)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b"]
    job.succeed(LaunchGroup)
    assert not job.of(ReleaseNode), "idle nodes may hold the restore point"
    job.step(4)
    assert job.one(ReleaseNode).node == "d"
    assert job.one_reason(ReleaseNode) == "4 nodes, 3 wanted"
    assert list(job.state.nodes) == ["a", "b", "c"]


def test_a_script_keeps_idle_nodes_until_its_workers_have_restored_from_memory() -> None:
    """The job is running as soon as its workers run, and they read shards of idle nodes."""
    job = Transcript(spec({"min": 1, "max": 3}, shard="world", script=True)).started("a", "b", "c")
    job.apply(ResizeRequested(nodes=2))
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    assert job.state.phase == "running" and not job.of(ReleaseNode)
    assert not job.wait(5)
    job.step(4)
    assert job.one(ReleaseNode).node == "c"


def test_a_script_without_a_state_to_restore_releases_idle_nodes_at_once() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, shard="world", script=True))
    job.started("a", "b", "c", step=None)
    job.apply(ResizeRequested(nodes=2))
    job.all_stopped()
    job.succeed(LaunchGroup)
    assert [action.node for action in job.all(ReleaseNode)] == ["c"]


def test_a_job_that_may_grow_keeps_its_idle_nodes() -> None:
    """Three of four nodes are a whole number of replicas of one node, five of six are not."""
    job = Transcript(spec({"min": 2, "max": 4}, workers=2, shard=4)).started(
        "a", "b", "c", step=None
    )
    job.wait(5)
    job.succeed(LaunchGroup)
    job.step(0)
    assert len(job.state.group.members) == 2 and not job.of(ReleaseNode)
    assert list(job.state.nodes) == ["a", "b", "c"]


def test_a_suspended_job_releases_nodes_that_join_and_that_are_promised() -> None:
    job = Transcript(spec(suspend=True))
    job.submit()
    job.join("a")
    assert job.one_reason(ReleaseNode) == "the job is suspended"
    job.state.supply.promised.append(PendingNode("b", job.now_ns))
    job.apply(Tick())
    assert job.one(ReleaseNode).node == "b" and not job.state.supply.promised


def test_a_cordoned_node_is_kept_until_its_state_is_not_needed() -> None:
    job = Transcript(spec({"min": 2, "max": 2}, recovery={"badNodeStrikes": 1})).started()
    job.exits(2, signal=9)
    job.all_stopped(3)
    assert not job.of(ReleaseNode), "the next generation may start from its memory"
    job.succeed(RequestNodes)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]
    job.succeed(LaunchGroup)
    assert not job.of(ReleaseNode)
    job.step(4)
    assert job.one(ReleaseNode).reason == Reason("bad-node", "b caused 1 incident")


@pytest.mark.parametrize(("step", "kept"), [(3, True), (2, False)])
def test_a_cordoned_node_is_kept_only_for_the_newest_state(step: int, kept: bool) -> None:
    job = Transcript(spec({"min": 2, "max": 2}, recovery={"badNodeStrikes": 1})).started()
    job.exits(2, signal=9)
    job.stopped("a", 3)
    job.stopped("b", staged=tuple(StagedShard(step, 1, shard, 2, 1) for shard in range(2)))
    assert (not job.of(ReleaseNode)) == kept


def test_an_idle_node_that_leaves_is_kept_until_the_next_generation_has_trained() -> None:
    job = Transcript(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
    job.exits(0, signal=9)
    job.apply(FromNode("c", PreemptionNoticed(detail="spot")))
    assert not job.of(ReleaseNode)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    assert not job.all(ReleaseNode), "what the members hold is known only when they stop"
    job.step(4)
    assert job.one(ReleaseNode).node == "c"


def test_no_idle_node_is_released_before_all_have_reconnected_to_a_new_controller() -> None:
    job = Transcript(spec({"min": 3, "max": 3}, shard=6)).started("a", "b", "c")
    job.lose("c")
    job.fail(job.one(RequestNodes))
    job.stopped("a")
    job.stopped("b")
    assert job.state.phase == "pending"
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    job.apply(FromNode("a", NodeJoined(facts=facts("a"))))
    job.apply(FromNode("a", PreemptionNoticed(detail="spot")))
    assert not job.of(ReleaseNode), "b may have the other part of a newer state"
    job.apply(FromNode("b", NodeJoined(facts=facts("b"))))
    assert job.one(ReleaseNode).node == "a"


def test_losses_during_a_pause_do_not_extend_it() -> None:
    job = Transcript()
    job.submit()
    promise(job, "x", "y")
    job.lose("x")
    due_ns = job.state.timers["request"]
    job.wait(0.5)
    job.lose("y")
    assert job.state.supply.num_failed_starts == 1 and job.state.timers["request"] == due_ns


def test_a_recalled_promise_is_forgotten() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, shard="auto"))
    job.submit()
    promise(job, "a", "b", "c")
    job.apply(ResizeRequested(nodes=2))
    assert job.one(ReleaseNode).node == "c"
    assert [one.name for one in job.state.supply.promised] == ["a", "b"]
    job.succeed(ReleaseNode)
    assert not job.apply(Tick())


def test_a_shrink_without_capacity_has_not_given_up_a_replacement() -> None:
    job = started(4.0)
    lose(job, granted=False)
    job.fail(job.last(RequestNodes))
    assert job.state.incidents[-1].decision == "shrink from 2 to 1 node, from memory after 6 steps"
