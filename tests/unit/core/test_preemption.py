"""A node has a preemption notice: the job goes on without it and loses no step."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import (
    CommitManifest,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ControllerStarted,
    FromNode,
    ResizeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.protocol.facts import Exit
from holdfast.orchestrator.protocol.messages import PreemptionNoticed, WorkerExited

from .harness import SECOND, Transcript, spec

GRACE_S = 30.0


def leave(job: Transcript, node: str = "b", grace_s: float = GRACE_S) -> None:
    job.apply(FromNode(node, PreemptionNoticed(detail="got SIGTERM", grace_s=grace_s)))


def sharded(**nodes: int) -> dict[str, Any]:
    """Every node has a part of the state that no other has."""
    return spec({"min": 2, "max": 2, **nodes}, 2, 4)


def stopped_without_room(job_spec: dict[str, Any]) -> Transcript:
    """A node leaves, there is no other one, and all workers have stopped after 31 steps."""
    job = Transcript(job_spec).started()
    leave(job)
    job.fail(job.one(RequestNodes))
    job.wait(GRACE_S / 3 + 0.1)
    job.all_stopped(30)
    return job


def test_a_spare_takes_over_at_once_and_no_step_is_lost() -> None:
    job = Transcript(sharded(spares=1)).started("a", "b", "c")
    leave(job)
    assert [stop.node for stop in job.of(StopGroup)] == ["a", "b"]
    job.all_stopped(30)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    restore = launches[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (30, "")
    served = {source.shard for source in restore.sources if source.node == "b"}
    assert served == {2, 3}, "the leaving node serves its memory until the first step"
    assert not job.of(ReleaseNode)
    job.succeed(LaunchGroup)
    job.step(31)
    assert job.one(ReleaseNode).node == "b"
    incident = job.state.incidents[-1]
    assert (incident.rule, incident.culprit_node) == ("preempted", "b")
    assert incident.step_before - (incident.resumed_after_step or 0) <= 0
    assert job.state.ledger.strikes == {}


def test_training_continues_until_the_replacement_has_joined() -> None:
    job = Transcript(sharded()).started()
    leave(job)
    assert job.one(RequestNodes).count == 1
    job.succeed(RequestNodes)
    job.wait(GRACE_S / 3 - 1)
    assert not job.of(StopGroup)
    job.join("c")
    assert [stop.node for stop in job.of(StopGroup)] == ["a", "b"]
    job.all_stopped(30)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_a_replacement_is_awaited_for_a_third_of_the_grace_period() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, 2, 2)).started()
    leave(job)
    job.succeed(RequestNodes)
    job.wait(GRACE_S / 3 + 0.1)
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(30)
    launch = job.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.num_nodes == 1
    assert launch.membership.restore is not None and launch.membership.restore.step == 30


def test_a_long_replacement_wait_does_not_extend_a_third_of_the_grace_period() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, 2, 2, recovery={"replacementWaitSeconds": 60}))
    leave(job.started())
    job.succeed(RequestNodes)
    job.wait(GRACE_S / 3 + 0.1)
    assert len(job.of(StopGroup)) == 2


def test_without_capacity_for_a_replacement_the_job_shrinks_at_once() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, 2, 2)).started()
    leave(job)
    job.fail(job.one(RequestNodes))
    assert len(job.of(StopGroup)) == 2


def test_a_job_that_must_wait_for_nodes_writes_its_newest_step_to_storage_first() -> None:
    job = Transcript(sharded()).started()
    leave(job)
    job.fail(job.one(RequestNodes))
    assert not job.of(StopGroup), "no node can replace it: training continues as long as it is safe"
    job.wait(GRACE_S / 3 + 0.1)
    assert len(job.of(StopGroup)) == 2
    job.all_stopped(30)
    asked = {action.node: action.step for action in job.of(PersistStep)}
    assert asked == {"a": 30, "b": 30} and job.state.phase == "pending"
    for shard in range(4):
        job.persisted(30, shard)
    job.one(CommitManifest)
    job.succeed(CommitManifest)
    assert job.one(ReleaseNode).node == "b", "storage has what it held"
    assert job.state.drain is None
    text = "the state after 31 steps is in storage; the leaving nodes can be released"
    assert (job.now_ns, text) in job.state.notes
    job.join("c")
    launch = job.of(LaunchGroup)[0]
    assert launch.membership.restore is not None
    assert launch.membership.restore.step == 30


def test_when_all_nodes_leave_their_state_is_in_storage_before_their_release() -> None:
    job = Transcript(sharded()).started()
    leave(job, "a")
    leave(job, "b")
    assert job.state.expected_nodes == 2
    job.wait(GRACE_S / 3 + 0.1)
    job.all_stopped(30)
    assert {action.node for action in job.of(PersistStep)} == {"a", "b"}
    for shard in range(4):
        job.persisted(30, shard)
    job.succeed(CommitManifest)
    assert {action.node for action in job.of(ReleaseNode)} == {"a", "b"}
    job.join("c", "d")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (30, True)


def test_shards_written_before_the_leaving_node_is_lost_count() -> None:
    job = stopped_without_room(sharded())
    job.persisted(30, 2)
    job.persisted(30, 3)
    job.lose("b")
    assert job.state.drain is not None, "a node that stays holds the missing shards"
    job.written(30)
    job.succeed(CommitManifest)
    job.join("c")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (30, True)


def test_nothing_is_written_when_the_nodes_that_stay_have_all_of_the_state() -> None:
    job = stopped_without_room(spec({"min": 2, "max": 2}, 2, 2))
    assert not job.of(PersistStep)


def test_a_replacement_that_joins_cancels_the_drain() -> None:
    job = stopped_without_room(sharded())
    job.join("c")
    assert job.state.drain is None
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, restore.directory) == (30, "")


def test_a_suspend_replaces_the_drain_of_a_state_at_risk() -> None:
    job = stopped_without_room(sharded())
    job.apply(SuspendRequested(by="test"))
    assert job.state.drain is not None and job.state.drain.kind == "suspend"
    for shard in range(4):
        job.persisted(30, shard)
    job.succeed(CommitManifest)
    assert job.state.phase == "suspended"


def test_a_node_that_leaves_while_the_job_starts_is_replaced_before_the_first_step() -> None:
    job = Transcript(sharded(spares=1)).started("a", "b", "c", step=None)
    leave(job)
    job.all_stopped(None)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_workers_killed_on_a_preempted_node_are_charged_as_a_preemption() -> None:
    job = Transcript(sharded()).started()
    leave(job)
    job.apply(FromNode("b", WorkerExited(generation=1, exit=Exit(rank=2, signal=9, step=5))))
    job.all_stopped(5)
    incident = job.state.incidents[-1]
    assert (incident.rule, incident.failure_class) == ("preempted", "preemption")
    assert "got SIGTERM" in incident.evidence and job.state.ledger.strikes == {}


def test_a_script_gets_half_of_the_leaving_nodes_time() -> None:
    job = Transcript(spec({"min": 2, "max": 2, "spares": 1}, 2, 4, script=True)).started(
        "a", "b", "c"
    )
    leave(job, grace_s=12.0)
    assert {stop.grace_s for stop in job.of(StopGroup)} == {6.0}


def test_a_leaving_spare_is_released_and_replaced() -> None:
    job = Transcript(sharded(spares=1)).started("a", "b", "c")
    leave(job, "c")
    assert job.one(ReleaseNode).node == "c"
    assert job.one(RequestNodes).count == 1
    assert not job.of(StopGroup)


def test_a_repeated_preemption_notice_changes_only_the_time_left() -> None:
    job = Transcript(sharded()).started()
    leave(job)
    job.wait(2.0)
    leave(job, grace_s=10.0)
    node = job.state.nodes["b"]
    assert node.leaves_ns == job.now_ns + 10 * 10**9
    leave(job, grace_s=60.0)
    assert node.leaves_ns == job.now_ns + 10 * 10**9
    assert job.fresh == []
    assert job.replayed().state == job.state


def test_the_reasons_of_two_preemption_notices_are_joined() -> None:
    job = Transcript(sharded()).started()
    job.apply(FromNode("b", PreemptionNoticed(detail="evicted: the node is being drained")))
    leave(job)
    job.succeed(RequestNodes)
    job.wait(GRACE_S / 3 - 0.1)
    assert not job.of(StopGroup), "the remaining time of the node is known now"
    job.join("c")
    job.all_stopped(30)
    evidence = job.state.incidents[-1].evidence
    assert evidence == "evicted: the node is being drained; got SIGTERM"


def test_a_resize_does_not_bring_a_leaving_node_back() -> None:
    job = Transcript(spec({"min": 1, "max": 3}, 2, "auto")).started("a", "b", "c")
    leave(job)
    job.apply(ResizeRequested(nodes=2))
    assert len(job.of(StopGroup)) == 3
    job.all_stopped(30)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_a_state_at_risk_that_is_lost_is_not_awaited() -> None:
    job = stopped_without_room(sharded())
    assert job.state.drain is not None
    text = "writing the state after 31 steps to storage: a node that holds a part of it leaves"
    assert (job.now_ns, text) in job.state.notes
    job.lose("b")
    assert job.state.drain is None, "its shards are gone"
    assert not any("is in storage" in text for _at, text in job.state.notes)


def test_a_new_controller_continues_to_write_a_state_at_risk_without_a_time_limit() -> None:
    job = stopped_without_room(sharded())
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    assert "persist" not in job.state.timers and "drain" in job.state.timers


def test_a_preemption_notice_is_noted_with_the_time_and_the_reason() -> None:
    job = Transcript(sharded()).started()
    leave(job)
    assert job.state.notes[-1][1] == "b will be preempted in 30 s: got SIGTERM"
    job.apply(FromNode("a", PreemptionNoticed(grace_s=0.0)))
    assert job.state.notes[-1][1] == "a will be preempted: no detail given"
    assert job.state.nodes["a"].leaves_ns is None
    assert not job.apply(FromNode("x", PreemptionNoticed(detail="unknown")))
    assert len(job.state.notes) == 2


def test_the_same_reason_is_not_repeated() -> None:
    job = Transcript(sharded()).started()
    for _ in range(2):
        leave(job)
        job.apply(FromNode("b", PreemptionNoticed()))
    assert job.state.nodes["b"].leave_reason == "got SIGTERM"


def test_the_incident_of_a_preemption_names_all_leaving_nodes() -> None:
    job = Transcript(spec({"min": 2, "max": 3, "spares": 1}, 2, "auto"))
    job.started("a", "b", "c", "d", step=5)
    leave(job, "b", 60)
    assert job.one_reason(StopGroup) == "b will be preempted (got SIGTERM); 3 nodes are usable"
    job.all_stopped(5)
    assert job.state.incidents[0].title == "b will be preempted"
    assert job.state.reason.code == "preemption"
    both = Transcript(sharded()).started(step=5)
    leave(both, "a")
    leave(both, "b")
    both.wait(GRACE_S / 3 + 0.1)
    both.all_stopped(5)
    incident = both.state.incidents[0]
    assert incident.title == "a, b will be preempted" and incident.culprit_node == "a"
    assert incident.evidence == "got SIGTERM"
    assert both.state.ledger.restarts == {"preemption": 1}


def test_a_member_lost_before_its_preemption_is_a_preemption() -> None:
    job = Transcript(sharded()).started(step=5)
    leave(job)
    job.lose("b", "disconnected")
    job.all_stopped(5)
    incident = job.state.incidents[0]
    assert (incident.rule, incident.culprit_node) == ("preempted", "b")


def test_a_recipe_has_no_grace_period_and_a_script_without_a_known_time_its_own() -> None:
    recipe = Transcript(sharded(spares=1)).started("a", "b", "c")
    leave(recipe)
    assert {stop.grace_s for stop in recipe.of(StopGroup)} == {0.0}
    recovery = {"terminationGraceSeconds": 7}
    document = spec({"min": 2, "max": 2, "spares": 1}, 2, 4, script=True, recovery=recovery)
    script = Transcript(document).started("a", "b", "c")
    script.apply(FromNode("b", PreemptionNoticed(detail="spot")))
    assert {stop.grace_s for stop in script.of(StopGroup)} == {7.0}
    limit_ns = round((7.0 + limits.STOP_TIMEOUT_S) * SECOND)
    assert script.state.timers["stop"] == script.now_ns + limit_ns
    late = Transcript(document).started("a", "b")
    leave(late, grace_s=12.0)
    late.wait(13)
    assert {stop.grace_s for stop in late.all(StopGroup)} == {4.0}, "half of what was left"


def test_an_idle_leaving_node_is_released_while_nothing_runs_unless_it_holds_the_state() -> None:
    job = Transcript(spec({"min": 2, "max": 3}, 2, "auto"))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    leave(job, "a")
    release = job.one(ReleaseNode)
    assert release.reason.code == "preemption"
    assert release.reason.text == "a will be preempted and is idle"
