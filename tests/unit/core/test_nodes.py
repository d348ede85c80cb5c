"""Nodes that join, rejoin and are lost: what counts, and what is sent again."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    LaunchGroup,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    ControllerStarted,
    FromNode,
    NodeLost,
    StragglerDetected,
)
from holdfast.orchestrator.core.nodes import MAX_DETAIL, num_usable, possible_size, usable
from holdfast.orchestrator.core.provisioning import rejoin_s
from holdfast.orchestrator.protocol.facts import Exit, StagedShard
from holdfast.orchestrator.protocol.messages import (
    GroupStopped,
    NodeJoined,
    PreemptionNoticed,
    WorkerExited,
)

from .harness import Transcript, facts, spec


def test_the_smallest_main_memory_of_the_nodes_that_are_here_counts() -> None:
    job = Transcript()
    job.submit()
    for name, gib in (("a", 8), ("b", 4), ("c", 4)):
        job.join(name, facts=facts(name, memory_bytes=gib * 2**30))
    nodes = job.state.nodes
    for lost, gib in (("b", 4), ("c", 8)):
        nodes.pop(lost)
        assert nodes.least_memory() == (None, gib * 2**30)


def test_only_free_nodes_with_enough_slots_are_usable() -> None:
    job = Transcript(spec({"min": 1, "max": 8}, shard="auto"))
    job.submit()
    job.state.generation = 3
    job.join("a", "b", "c", "d", "e")
    nodes = job.state.nodes
    nodes.change("b", confirmed=False)
    nodes.change("c", preempting=True)
    job.state.ledger.cordoned["d"] = "bad"
    nodes.change("e", generation=3)
    assert [node.name for node in usable(job.state)] == ["a"] and num_usable(job.state) == 1
    job.apply(FromNode("f", NodeJoined(facts=facts("f", 1))))
    assert [node.name for node in usable(job.state)] == ["a"], "f has one slot, two are needed"
    job.apply(FromNode("g", NodeJoined(facts=facts("g", 3))))
    assert [node.name for node in usable(job.state)] == ["a", "g"] and num_usable(job.state) == 2


def test_members_are_usable_while_their_generation_runs_and_others_once_they_have_stopped() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(3)
    job.apply(FromNode("c", NodeJoined(facts=facts("c"), generation=1, ranks=(0, 1))))
    stop = job.one(StopGroup)
    assert (stop.node, stop.generation) == ("c", 1)
    assert stop.reason.text == "c still runs generation 1, not 2"
    assert [node.name for node in usable(job.state)] == ["a", "b"]
    job.apply(FromNode("c", GroupStopped(action_id=stop.action_id, generation=1)))
    assert [node.name for node in usable(job.state)] == ["a", "b", "c"]
    job.exits(0, signal=9)
    job.stopped("a", 3)
    assert [node.name for node in usable(job.state)] == ["a", "b", "c"]


def test_the_possible_size_is_bounded_by_the_wanted_size_and_the_minimum() -> None:
    job = Transcript(spec({"min": 2, "max": 3}, shard="auto"))
    job.submit()
    job.join("a")
    assert possible_size(job.state) == 0
    job.join("b")
    assert possible_size(job.state) == 2


def test_a_rejoin_replaces_the_facts_and_keeps_the_port_that_is_not_offered_again() -> None:
    job = Transcript().started()
    port = job.state.nodes["a"].offered_port
    staged = (StagedShard(3, 1, 0, 2, 1),)
    again = facts("a", 4)
    job.apply(FromNode("a", NodeJoined(facts=again, generation=1, ranks=(0, 1), staged=staged)))
    node = job.state.nodes["a"]
    assert (node.facts, node.staged, node.offered_port) == (again, staged, port)
    assert (node.join_order, node.generation) == (1, 1)
    job.apply(FromNode("a", NodeJoined(facts=again, generation=1, ranks=(0, 1), offered_port=9)))
    assert job.state.nodes["a"].offered_port == 9 and not job.fresh


def test_the_port_that_a_stopped_node_offers_is_used_next() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    port = job.state.nodes["a"].offered_port
    job.stopped("b", 3)
    assert job.state.stop is not None
    event = FromNode("a", GroupStopped(action_id=job.state.stop.waiting["a"], generation=1))
    job.apply(event)
    assert job.of(LaunchGroup)[0].membership.master_port == port, "none was offered"


def test_a_member_that_rejoins_before_its_launch_was_answered_gets_it_again() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    first = job.of(LaunchGroup)[1]
    job.apply(FromNode("b", NodeJoined(facts=facts("b"))))
    again = job.one(LaunchGroup)
    assert (again.node, again.seats) == ("b", first.seats)
    assert again.reason.text == "b may not have received its launch"
    assert again.reason.code == "controller-restart"
    assert job.state.group.launching["b"] == again.action_id
    assert job.state.nodes["b"].generation == 1
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), generation=1, ranks=(2, 3))))
    assert not job.fresh and list(job.state.group.launching) == ["a"], "it runs the generation"
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), generation=1, ranks=(0, 1))))
    assert job.state.group.launching == {} and not job.wait(60)


def test_a_member_without_its_workers_breaks_the_generation_with_the_reason() -> None:
    job = Transcript().started()
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), offered_port=9)))
    assert job.one_reason(StopGroup) == "b rejoined without its workers of generation 1"
    job.all_stopped(3)
    incident = job.state.incidents[0]
    assert (incident.rule, incident.culprit_node) == ("launch-failed", "b")
    assert incident.evidence == "b rejoined without its workers of generation 1"


def test_a_member_that_rejoins_during_a_stop_gets_the_stop_again_until_it_has_stopped() -> None:
    job = Transcript(spec(script=True, recovery={"terminationGraceSeconds": 7}))
    job.started(step=None)
    job.exits(0, signal=9)
    job.apply(FromNode("b", NodeJoined(facts=facts("b"), generation=1, ranks=(2, 3))))
    again = job.one(StopGroup)
    assert again.reason.text == "b may not have received the stop"
    assert (again.node, again.grace_s, again.stacks) == ("b", 0.0, False)
    assert job.state.stop is not None and job.state.stop.waiting["b"] == again.action_id
    job.stopped("b")
    job.apply(FromNode("b", NodeJoined(facts=facts("b"))))
    assert not job.fresh


def test_a_released_node_that_connects_is_released_again_with_the_reason() -> None:
    job = Transcript().started()
    job.lose("b", "silent", "no heartbeat")
    job.succeed(ReleaseNode)
    job.apply(FromNode("b", NodeJoined(facts=facts("b"))))
    assert job.one_reason(ReleaseNode) == "b was released: lost (silent): no heartbeat"


def test_a_release_under_way_is_not_requested_twice() -> None:
    job = Transcript().started()
    job.lose("b")
    job.apply(FromNode("b", NodeJoined(facts=facts("b"))))
    assert not job.of(ReleaseNode)
    assert job.state.supply.released == {"b": "lost (gone): gone"}, "the first reason stays"


def test_a_node_lost_before_it_joined_is_a_failed_start_with_a_short_detail() -> None:
    job = Transcript()
    job.submit()
    request = job.one(RequestNodes)
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("x", "y")))
    job.lose("x", "gone", "e" * (MAX_DETAIL + 9))
    assert job.state.supply.failed_starts == {"x": "e" * MAX_DETAIL}
    assert job.state.supply.released == {"x": "lost before it joined (gone)"}
    assert [one.name for one in job.state.supply.promised] == ["y"]
    job.lose("x", "gone", "again")
    assert job.state.supply.num_failed_starts == 1
    job.lose("y", "withdrawn")
    assert job.state.supply.failed_starts["y"] == "withdrawn"


def test_the_loss_of_a_released_node_is_no_failed_start() -> None:
    job = Transcript().started()
    job.lose("b", detail="killed")
    assert not job.lose("b", "silent")
    assert job.state.supply.released == {"b": "lost (gone): killed"}
    assert job.state.supply.failed_starts == {} and "request" not in job.state.timers


def test_a_lost_spare_interrupts_nothing() -> None:
    job = Transcript(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
    job.lose("c")
    assert not job.of(StopGroup) and job.state.phase == "running"
    assert job.one(RequestNodes).count == 1


def test_a_node_lost_between_two_generations_is_no_member_that_was_lost() -> None:
    job = Transcript(spec({"min": 3, "max": 3}, shard="auto")).started("a", "b", "c")
    job.lose("c")
    job.succeed(RequestNodes)
    job.all_stopped(3)
    assert not job.state.group.active
    job.lose("b")
    assert job.state.num_incidents == 1 and job.state.stop is None
    assert job.state.incidents[0].evidence == "gone"


def test_the_loss_of_a_member_is_the_reason_of_the_stop() -> None:
    job = Transcript().started()
    job.lose("b", "disconnected", "reset by peer")
    assert job.one_reason(StopGroup) == "b was lost (disconnected): reset by peer"
    other = Transcript().started()
    other.lose("b", "gone")
    assert other.one_reason(StopGroup) == "b was lost (gone): gone"


def test_a_new_controller_loses_only_nodes_that_did_not_reconnect() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), generation=1, ranks=(0, 1))))
    job.wait(15.0)
    text = "lost (silent): did not reconnect within 15 s of the controller's start"
    assert job.state.supply.released == {"b": text}


def test_what_ended_without_a_controller_is_lost_with_that_reason() -> None:
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("a",)))
    assert job.one_reason(ReleaseNode) == "lost (gone): ended while no controller was running"
    assert not job.state.nodes["a"].confirmed


def test_a_new_controller_keeps_promises_that_the_backend_still_has() -> None:
    job = Transcript(spec({"min": 4, "max": 4}, shard="auto"))
    job.submit()
    request = job.one(RequestNodes)
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("w", "x")))
    job.wait(2)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("x", "y")))
    assert [(one.name, one.recovered) for one in job.state.supply.promised] == [
        ("x", False),
        ("y", True),
    ]
    assert job.one(RequestNodes).count == 2
    job.apply(NodeLost(node="y", cause="gone"))
    assert [one.name for one in job.state.supply.promised] == ["x"]


@pytest.mark.parametrize("order", ["abc", "cab"])
def test_generations_that_the_journal_lacks_are_stopped_and_never_numbered_again(
    order: str,
) -> None:
    """The last controller could not journal generations 2 and 3, so c is no member in it."""
    job = Transcript().started()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    for name in order:
        job.apply(FromNode(name, NodeJoined(facts=facts(name), generation=3, ranks=(0, 1))))
    assert {(stop.node, stop.generation) for stop in job.all(StopGroup)} == {(n, 3) for n in order}
    for shard in range(2):
        job.persisted(9, shard)
    assert job.last(CommitManifest).generation == 3, "what they have written is not lost"
    job.apply(FromNode("c", WorkerExited(generation=3, exit=Exit(rank=0, code=0))))
    assert job.state.group.exits == {}, "c has another rank 0"
    (action_id,) = [stop.action_id for stop in job.all(StopGroup) if stop.node == "c"]
    job.apply(FromNode("c", GroupStopped(action_id=action_id, generation=3)))
    assert job.state.nodes["c"].generation == 0, "it can be used"
    job.all_stopped()
    assert job.last(LaunchGroup).membership.generation == 4
    incident = job.state.incidents[0]
    assert (incident.rule, incident.culprit_node) == ("journal-behind", "")
    assert incident.evidence == "nodes run generation 3; the newest in the journal is 1"
    assert job.state.ledger.strikes == {}, "no node is at fault"


def test_staged_state_of_a_generation_that_the_journal_lacks_is_not_numbered_again() -> None:
    job = Transcript()
    job.submit()
    shard = StagedShard(step=9, generation=5, shard=0, num_shards=1, num_bytes=1)
    job.join("a", "b", staged=(shard,))
    assert job.last(LaunchGroup).membership.generation == 6


def test_a_slow_node_is_replaced_once_and_only_while_it_is_a_member() -> None:
    nodes = {"min": 2, "max": 2, "spares": 1}
    job = Transcript(spec(nodes, workers=1, recovery={"replaceStragglers": True}))
    job.started("a", "b", "c")
    for name in ("unknown", "c"):
        job.apply(StragglerDetected(generation=1, node=name, evidence="0.9 s a step"))
        assert not job.fresh
    assert not any(node.slow or node.preempting for node in job.state.nodes.values())
    job.apply(FromNode("a", PreemptionNoticed(detail="spot")))
    job.apply(StragglerDetected(generation=1, node="a", evidence="0.9 s a step"))
    assert (job.state.nodes["a"].slow, job.state.nodes["a"].leave_reason) == (False, "spot")
    other = Transcript(spec(nodes, workers=1, recovery={"replaceStragglers": True}))
    other.started("a", "b", "c")
    other.apply(StragglerDetected(generation=1, node="b", evidence="x" * (MAX_DETAIL + 9)))
    reason = other.state.nodes["b"].leave_reason
    assert reason.startswith("it is slow: xxx") and len(reason) == MAX_DETAIL


def test_a_request_that_the_controller_before_made_is_not_repeated_at_once() -> None:
    job = Transcript()
    job.submit()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert not job.of(RequestNodes), "the backend was not asked what it has"
    job.wait(rejoin_s(job.state) - 0.1)
    assert not job.of(RequestNodes)
    job.wait(0.2)
    assert job.one(RequestNodes).count == 2


def test_a_node_that_the_backend_has_and_that_never_joins_is_released() -> None:
    job = Transcript()
    job.submit()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("x", "y")))
    assert not job.wait(job.state.supply.start_limit_s - 0.1)
    job.wait(0.2)
    assert sorted(action.node for action in job.of(ReleaseNode)) == ["x", "y"]
    assert job.one(RequestNodes).count == 2


def test_a_second_notice_does_not_extend_the_wait_for_a_replacement() -> None:
    job = Transcript().started()
    job.apply(FromNode("b", PreemptionNoticed(grace_s=100, detail="spot")))
    due_ns, leaves_ns = job.state.timers["preempt"], job.state.nodes["b"].leaves_ns
    job.wait(1)
    job.apply(FromNode("b", PreemptionNoticed(grace_s=200, detail="again")))
    assert job.state.timers["preempt"] == due_ns
    assert job.state.nodes["b"].leaves_ns == leaves_ns


def test_workers_of_a_generation_that_the_journal_lacks_are_stopped_between_two_generations() -> (
    None
):
    job = Transcript(spec({"min": 2, "max": 2})).started()
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 3)
    assert job.state.phase == "pending" and not job.state.group.active
    job.apply(FromNode("c", NodeJoined(facts=facts("c"), generation=5, ranks=(0, 1))))
    stop = job.one(StopGroup)
    assert (stop.node, stop.generation, job.state.generation) == ("c", 5, 5)
    job.apply(FromNode("c", GroupStopped(action_id=stop.action_id, generation=5)))
    assert {launch.membership.generation for launch in job.of(LaunchGroup)} == {6}
