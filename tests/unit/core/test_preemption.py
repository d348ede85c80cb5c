"""A node says that it will be taken away: the job moves on without it and without losing a step."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    PreemptionNoticed,
    ResizeRequested,
    SuspendRequested,
    WorkerExited,
)
from holdfast.orchestrator.protocol.facts import Exit

from .harness import Transcript, spec

GRACE_S = 30.0


def leave(story: Transcript, node: str = "b", grace_s: float = GRACE_S) -> None:
    story.tell(PreemptionNoticed(node=node, detail="got SIGTERM", grace_s=grace_s))


def sharded(**nodes: int) -> dict[str, Any]:
    """Every node has a part of the state that no other has."""
    return spec({"min": 2, "max": 2, **nodes}, 2, 4)


def test_a_spare_takes_over_at_once_and_no_step_is_lost() -> None:
    story = Transcript(sharded(spares=1)).started("a", "b", "c")
    leave(story)
    assert [stop.node for stop in story.of(StopGroup)] == ["a", "b"]
    story.all_stopped(30)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    restore = launches[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (30, "")
    served = {source.shard for source in restore.sources if source.node == "b"}
    assert served == {2, 3}, "the leaving node serves its memory until nobody needs it"
    assert not story.of(ReleaseNode)
    story.succeed(LaunchGroup)
    story.step(31)
    assert story.one(ReleaseNode).node == "b"
    incident = story.state.incidents[-1]
    assert (incident.rule, incident.culprit_node) == ("preempted", "b")
    assert incident.step_before - (incident.resumed_after_step or 0) <= 0
    assert story.state.strikes == {}


def test_training_goes_on_while_a_replacement_is_on_its_way() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    assert story.one(RequestNodes).count == 1
    story.succeed(RequestNodes)
    story.wait(GRACE_S / 3 - 1)
    assert not story.of(StopGroup)
    story.join("c")
    assert [stop.node for stop in story.of(StopGroup)] == ["a", "b"]
    story.all_stopped(30)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_a_replacement_that_does_not_come_in_a_third_of_the_grace_is_not_waited_for() -> None:
    story = Transcript(spec({"min": 1, "max": 2}, 2, 2)).started()
    leave(story)
    story.succeed(RequestNodes)
    story.wait(GRACE_S / 3 + 0.1)
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(30)
    launch = story.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.num_nodes == 1
    assert launch.membership.restore is not None and launch.membership.restore.step == 30


def test_patience_for_replacements_does_not_make_a_leaving_node_wait_for_its_end() -> None:
    story = Transcript(spec({"min": 1, "max": 2}, 2, 2, recovery={"replacementWaitSeconds": 60}))
    leave(story.started())
    story.succeed(RequestNodes)
    story.wait(GRACE_S / 3 + 0.1)
    assert len(story.of(StopGroup)) == 2


def test_where_there_is_no_room_for_a_replacement_the_job_shrinks_at_once() -> None:
    story = Transcript(spec({"min": 1, "max": 2}, 2, 2)).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    assert len(story.of(StopGroup)) == 2


def test_a_job_that_must_wait_for_nodes_has_its_newest_step_in_storage_first() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    assert not story.of(StopGroup), "nobody can take over: what can be trained is trained"
    story.wait(GRACE_S / 3 + 0.1)
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(30)
    asked = {action.node: action.step for action in story.of(PersistStep)}
    assert asked == {"a": 30, "b": 30} and story.state.phase == "pending"
    for shard in range(4):
        story.persisted(30, shard)
    story.one(CommitManifest)
    story.succeed(CommitManifest)
    assert story.one(ReleaseNode).node == "b", "free to go: storage has what it held"
    story.join("c")
    launch = story.of(LaunchGroup)[0]
    assert launch.membership.restore is not None
    assert launch.membership.restore.step == 30


def test_when_all_nodes_leave_at_once_everything_is_in_storage_before_they_go() -> None:
    story = Transcript(sharded()).started()
    leave(story, "a")
    leave(story, "b")
    assert story.state.expected_nodes == 2
    story.wait(GRACE_S / 3 + 0.1)
    story.all_stopped(30)
    assert {action.node for action in story.of(PersistStep)} == {"a", "b"}
    for shard in range(4):
        story.persisted(30, shard)
    story.succeed(CommitManifest)
    assert {action.node for action in story.of(ReleaseNode)} == {"a", "b"}
    story.join("c", "d")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (30, True)


def test_what_a_parked_job_wrote_counts_even_if_the_leaving_node_goes_first() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    story.wait(GRACE_S / 3 + 0.1)
    story.all_stopped(30)
    story.persisted(30, 2)
    story.persisted(30, 3)
    story.lose("b")
    assert story.state.drain is not None, "what is missing is in the memory of a node that stays"
    story.persisted(30, 0)
    story.persisted(30, 1)
    story.succeed(CommitManifest)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (30, True)


def test_nothing_is_written_when_the_nodes_that_stay_have_all_of_the_state() -> None:
    story = Transcript(spec({"min": 2, "max": 2}, 2, 2)).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    story.wait(GRACE_S / 3 + 0.1)
    story.all_stopped(30)
    assert not story.of(PersistStep)


def test_a_replacement_ends_the_way_to_storage() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    story.wait(GRACE_S / 3 + 0.1)
    story.all_stopped(30)
    story.join("c")
    assert story.state.drain is None
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (30, "")


def test_a_suspension_takes_over_what_was_being_written() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.fail(story.one(RequestNodes))
    story.wait(GRACE_S / 3 + 0.1)
    story.all_stopped(30)
    story.tell(SuspendRequested(by="test"))
    assert story.state.drain is not None and story.state.drain.kind == "suspend"
    for shard in range(4):
        story.persisted(30, shard)
    story.succeed(CommitManifest)
    assert story.state.phase == "suspended"


def test_a_node_that_leaves_while_the_job_starts_is_replaced_before_the_first_step() -> None:
    story = Transcript(sharded(spares=1)).started("a", "b", "c", step=None)
    leave(story)
    story.all_stopped(None)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_workers_that_are_killed_with_their_machine_are_no_fault_of_it() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.tell(WorkerExited(node="b", generation=1, exit=Exit(rank=2, signal=9, step=5)))
    story.all_stopped(5)
    incident = story.state.incidents[-1]
    assert (incident.rule, incident.failure_class) == ("preempted", "preemption")
    assert "got SIGTERM" in incident.evidence and story.state.strikes == {}


def test_a_script_gets_half_of_what_the_leaving_node_has() -> None:
    story = Transcript(spec({"min": 2, "max": 2, "spares": 1}, 2, 4, script=True)).started(
        "a", "b", "c"
    )
    leave(story, grace_s=12.0)
    assert {stop.grace_s for stop in story.of(StopGroup)} == {6.0}


def test_a_leaving_spare_is_given_back_and_replaced() -> None:
    story = Transcript(sharded(spares=1)).started("a", "b", "c")
    leave(story, "c")
    assert story.one(ReleaseNode).node == "c"
    assert story.one(RequestNodes).count == 1
    assert not story.of(StopGroup)


def test_an_announcement_that_is_repeated_changes_only_the_time_left() -> None:
    story = Transcript(sharded()).started()
    leave(story)
    story.wait(2.0)
    leave(story, grace_s=10.0)
    node = story.state.nodes["b"]
    assert node.leaves_ns == story.now + 10 * 10**9
    leave(story, grace_s=60.0)
    assert node.leaves_ns == story.now + 10 * 10**9
    assert story.fresh == []
    assert story.replayed().state == story.state


def test_what_kubernetes_says_first_is_joined_with_what_the_node_says_then() -> None:
    story = Transcript(sharded()).started()
    story.tell(PreemptionNoticed(node="b", detail="evicted: the node is being drained"))
    leave(story)
    story.succeed(RequestNodes)
    story.wait(GRACE_S / 3 - 0.1)
    assert not story.of(StopGroup), "the time that the node has is known now"
    story.join("c")
    story.all_stopped(30)
    evidence = story.state.incidents[-1].evidence
    assert evidence == "evicted: the node is being drained; got SIGTERM"


def test_a_resize_does_not_bring_a_leaving_node_back() -> None:
    story = Transcript(spec({"min": 1, "max": 3}, 2, "auto")).started("a", "b", "c")
    leave(story)
    story.tell(ResizeRequested(nodes=2))
    assert len(story.of(StopGroup)) == 3
    story.all_stopped(30)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
