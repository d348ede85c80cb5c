"""Placement and launch after the loss of workers and nodes, and waiting for nodes."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import (
    FinishJob,
    LaunchGroup,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    FromNode,
    ResizeRequested,
    ResumeRequested,
    StepCompleted,
    SuspendRequested,
    Tick,
)
from holdfast.orchestrator.core.launching import MESHES_KEPT
from holdfast.orchestrator.core.roster import Promises
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import NodeJoined

from .harness import SECOND, Transcript, facts, spec


def test_a_job_requests_nodes_and_spares_and_launches_when_all_have_joined() -> None:
    job = Transcript(spec({"min": 1, "max": 2, "spares": 1}))
    job.submit()
    assert job.one(RequestNodes).count == 3
    job.succeed(RequestNodes)
    assert not job.join("a")
    job.join("b")
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "b"]
    assert [seat.rank for launch in launches for seat in launch.seats] == [0, 1, 2, 3]
    assert launches[0].membership.mesh.describe() == "replicate 2 x shard 2"
    assert launches[0].membership.restore is None
    # One rank of each replicate group writes to storage, spread over the nodes.
    assert [[s.persists for s in launch.seats] for launch in launches] == [
        [True, False],
        [False, True],
    ]
    assert not job.join("c"), "the spare waits"


def test_fewer_nodes_than_wanted_are_launched_after_the_grow_delay() -> None:
    job = Transcript(spec({"min": 1, "max": 2}))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    assert not [a for a in job.wait(4.9) if isinstance(a, LaunchGroup)]
    job.wait(0.2)
    assert job.one(LaunchGroup).membership.num_nodes == 1
    job.succeed(LaunchGroup)
    job.step(0)
    job.join("b")
    assert not job.of(StopGroup), "the grow delay gathers nodes"
    job.wait(5.1)
    assert job.one(StopGroup).reason.code == "resize"
    job.all_stopped(9)
    assert {launch.membership.num_nodes for launch in job.of(LaunchGroup)} == {2}
    assert job.state.ledger.restarts == {}, "growing is not charged"


def test_a_killed_worker_costs_a_new_generation_from_memory() -> None:
    job = Transcript().started(step=3)
    job.exits(2, signal=9, step=7)
    assert [stop.node for stop in job.of(StopGroup)] == ["a", "b"]
    assert all(stop.grace_s == 0 and not stop.stacks for stop in job.of(StopGroup))
    job.stopped("a", 8)
    assert not job.fresh, "the other node has not stopped"
    job.stopped("b", 7)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "b"]
    restore = launches[0].membership.restore
    assert restore is not None and restore.directory == ""
    assert (restore.step, restore.generation) == (8, 1), "one node alone holds both shards of 8"
    assert {source.node for source in restore.sources} == {"a"}
    assert launches[0].membership.restart_count == 1
    job.succeed(LaunchGroup)
    job.step(9)
    assert job.state.phase == "running"
    incident = job.state.incidents[0]
    assert incident.title == "worker 2 on b was killed by SIGKILL"
    assert (incident.culprit_node, incident.culprit_rank) == ("b", 2)
    assert incident.restored_from == "memory"
    assert job.state.ledger.restarts == {"infrastructure": 1}


@pytest.mark.parametrize(
    ("written", "own"),
    [
        pytest.param(Mesh(replicate=2, shard=2), True, id="same"),
        pytest.param(Mesh(replicate=9, shard=2), True, id="other-replicas"),
        pytest.param(Mesh(replicate=2, tensor=2), False, id="other-axes"),
        pytest.param(None, False, id="unknown"),
    ],
)
def test_only_on_the_same_mesh_is_each_rank_known_to_read_its_own_shard(
    written: Mesh | None, own: bool
) -> None:
    job = Transcript().started(step=3)
    job.exits(2, signal=9, step=7)
    del job.state.meshes[1]
    if written is not None:
        job.state.meshes[1] = written
    job.all_stopped(7)
    assert [launch.own_shards for launch in job.of(LaunchGroup)] == [own, own]
    job.succeed(StopGroup)
    job.wait(16)
    assert [launch.own_shards for launch in job.of(LaunchGroup)] == [own, own], "sent again"


def test_the_master_port_is_new_in_every_generation() -> None:
    job = Transcript().started()
    first = job.last(LaunchGroup).membership
    job.exits(0, signal=9)
    job.all_stopped(3)
    second = job.of(LaunchGroup)[0].membership
    assert second.master_address == first.master_address
    assert second.master_port != first.master_port


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    job = Transcript(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
    job.lose("a")
    assert job.one(RequestNodes).count == 1, "requested with the stops, not after them"
    assert job.one(ReleaseNode).node == "a"
    assert job.one(StopGroup).node == "b"
    job.stopped("b", 12)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["c", "b"], "the spare takes the same position"
    restore = launches[0].membership.restore
    assert restore is not None
    assert {source.node for source in restore.sources} == {"b"}


def test_a_shrink_waits_for_a_promised_replacement() -> None:
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    assert not job.fresh
    job.wait(1.5)
    assert not job.of(LaunchGroup)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]


def test_without_a_replacement_the_job_shrinks_and_grows_again_later() -> None:
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    job.wait(2.1)
    launch = job.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.mesh.describe() == "shard 2"
    assert "shrink from 2 to 1 node" in launch.reason.text
    job.succeed(LaunchGroup)
    job.step(6)
    job.join("c")
    job.wait(5.1)
    job.stopped("a", 20)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]
    assert job.state.ledger.restarts == {"infrastructure": 1}


def test_without_capacity_a_shrink_does_not_wait() -> None:
    job = Transcript().started()
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 5)
    assert job.one(LaunchGroup).membership.num_nodes == 1
    job.wait(5.1)
    assert job.one(RequestNodes).count == 1, "the request is repeated every few seconds"


def test_below_the_minimum_the_job_waits_with_the_reason() -> None:
    job = Transcript(spec({"min": 2, "max": 2})).started()
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 5)
    assert job.state.phase == "pending"
    assert "(1 of 2 ready" in job.state.reason.text
    job.wait(5.1)
    job.succeed(RequestNodes)
    job.join("c")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5, "the memory of the survivor was kept"


def test_a_node_that_does_not_stop_is_treated_as_lost() -> None:
    job = Transcript().started()
    job.exits(2, signal=9)
    job.stopped("a", 4)
    job.wait(10.1)
    assert "b" not in job.state.nodes
    assert job.one(ReleaseNode).node == "b"
    assert job.one(RequestNodes).count == 1
    job.wait(2.1)
    assert job.state.incidents[0].rule == "outside-signal", "the first cause stays the cause"


def test_half_of_a_shard_group_is_never_launched() -> None:
    job = Transcript(spec({"min": 2, "max": 4}, workers=2, shard=4)).started("a", "b", "c", "d")
    job.lose("b")
    job.fail(job.one(RequestNodes))
    for node in ("a", "c", "d"):
        job.stopped(node, 5)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["c", "d"], (
        "the whole group stays, and a is idle"
    )
    restore = launches[0].membership.restore
    assert restore is not None and "a" in {source.node for source in restore.sources}
    assert "a" in job.state.nodes, "its memory may still be needed"


def test_memory_of_a_lost_node_falls_back_to_storage() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, workers=1, shard=2), ports=50_000)
    job.document["spec"]["nodes"]["min"] = 2
    job.started(step=20)
    job.commit(9)
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 21)
    job.join("c")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None
    assert (restore.step, restore.directory) == (9, "step-00000009.gen-1")


PAIR = {"min": 2, "max": 2}
MINUTE = {"capacityTimeoutSeconds": 60}


def waiting() -> Transcript:
    """One node of two has joined, and the backend has no capacity for the other."""
    job = Transcript(spec(PAIR, recovery=MINUTE))
    job.submit()
    job.fail(job.one(RequestNodes))
    job.join("a")
    job.wait(5.1)
    job.fail(job.one(RequestNodes), "half of the quota is used")
    return job


def test_a_job_that_never_gets_its_nodes_fails_with_the_reason() -> None:
    job = waiting()
    job.wait(54)
    assert job.state.phase == "pending" and not job.of(FinishJob)
    job.fail(job.one(RequestNodes), "half of the quota is used")
    job.wait(1.1)
    finish = job.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "capacity")
    assert finish.reason.text == (
        "recovery.capacityTimeoutSeconds: waited 60 s for nodes (1 of 2 ready, "
        "0 starting); half of the quota is used"
    )
    assert not job.of(LaunchGroup)


def test_without_a_limit_the_job_waits() -> None:
    job = Transcript(spec(PAIR))
    job.submit()
    job.fail(job.one(RequestNodes))
    job.wait(100_000)
    assert job.state.phase == "pending"


def test_nodes_that_join_in_time_end_the_wait() -> None:
    job = waiting()
    job.wait(50)
    job.join("b")
    job.succeed(LaunchGroup)
    job.step(0)
    job.wait(100)
    assert job.state.phase == "running"


def test_enough_nodes_end_the_capacity_wait_and_a_loss_starts_another() -> None:
    job = Transcript(spec({"min": 2, "max": 3}, recovery=MINUTE))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    job.wait(58)
    job.join("b")
    job.wait(4)
    assert job.state.phase == "pending" and not job.of(LaunchGroup), "a third node may join"
    due_ns = job.controller.next_deadline_ns()
    assert due_ns is not None and due_ns > job.now_ns, "no timer that is due keeps the loop busy"
    job.lose("b")
    job.wait(55)
    assert job.state.phase == "pending" and not job.of(FinishJob)


def test_a_job_that_trained_and_fails_for_lack_of_nodes_keeps_its_newest_state() -> None:
    job = Transcript(spec(PAIR, recovery=MINUTE)).started()
    job.lose("b")
    job.fail(job.one(RequestNodes))
    job.stopped("a", 5)
    assert job.state.phase == "pending"
    job.wait(61)
    assert job.state.phase == "finishing"
    job.commit(5)
    finish = job.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "capacity")
    assert [committed.step for committed in job.state.catalog.committed] == [5]


def test_the_capacity_timeout_does_not_run_while_the_job_is_suspended() -> None:
    job = waiting()
    job.apply(SuspendRequested())
    job.wait(1000)
    assert job.state.phase == "suspended"
    job.apply(ResumeRequested())
    job.wait(59)
    assert job.state.phase == "pending", "the wait starts from the beginning"


def test_a_recovering_job_waits_for_capacity_with_the_reason_of_the_backend_or_its_own() -> None:
    job = Transcript(spec(PAIR))
    job.submit()
    job.fail(job.one(RequestNodes), "")
    assert job.state.phase == "pending"
    assert job.state.reason.text == (
        "waiting for nodes (0 of 2 ready, 0 starting); the backend has no capacity"
    )
    assert job.state.notes[-1][1] == "a request for 2 more nodes was refused: no capacity"
    job.wait(5.0)
    job.succeed(RequestNodes)
    job.join("a")
    assert job.state.reason.text == "waiting for nodes (1 of 2 ready, 1 starting)"


@pytest.mark.parametrize(
    ("nodes", "lost", "joins", "decision"),
    [
        (2, (), (), "restart on the same 2 nodes, from memory after 4 steps"),
        (2, ("b",), ("c",), "c replaces b, from memory after 4 steps"),
        (4, ("a", "b"), ("e", "f"), "e, f replace a, b, from memory after 4 steps"),
    ],
)
def test_the_decision_says_what_changes(
    nodes: int, lost: tuple[str, ...], joins: tuple[str, ...], decision: str
) -> None:
    job = Transcript(spec({"min": nodes, "max": nodes}))
    job.started(*"abcd"[:nodes], step=3)
    if not lost:
        job.exits(0, signal=9)
    for name in lost:
        job.lose(name)
    job.succeed(RequestNodes)
    job.all_stopped(3)
    job.join(*joins)
    assert job.last(LaunchGroup).reason.text == decision
    assert job.state.incidents[-1].decision == decision


def test_the_decision_says_where_the_state_comes_from() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    assert job.one_reason(LaunchGroup) == "launch on 2 nodes, from the beginning"
    assert job.state.phase == "starting" and job.state.incidents == []
    job.succeed(LaunchGroup)
    job.step(9)
    job.commit(9)
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert job.one_reason(LaunchGroup).endswith(", from storage after 10 steps")
    incident = job.state.incidents[0]
    assert (incident.restored_from, incident.resumed_after_step) == ("storage", 9)
    fresh = Transcript().started()
    fresh.exits(0, signal=9)
    fresh.all_stopped(None)
    text = "restart on the same 2 nodes, from the beginning"
    assert fresh.one_reason(LaunchGroup) == f"{text}: no complete state was staged yet"
    incident = fresh.state.incidents[0]
    assert (incident.restored_from, incident.resumed_after_step) == ("nothing", -1)


def test_a_script_has_no_state_that_holdfast_restores() -> None:
    job = Transcript(spec({"min": 1, "max": 1}, script=True))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    assert job.one_reason(LaunchGroup) == "launch on 1 node"
    job.succeed(LaunchGroup)
    assert job.state.reason.text == "all workers run, on 1 node"
    job.exits(0, signal=9)
    job.all_stopped(None)
    expected = "restart on the same node; no checkpoint of the script was seen"
    assert job.one_reason(LaunchGroup) == expected
    assert job.state.phase == "recovering"
    job.succeed(LaunchGroup)
    assert job.state.phase == "running"
    job.apply(StepCompleted(generation=2, step=0, counted_by="session"))
    job.lose("a")
    job.join("b")
    assert ", from the beginning: no usable state is left" in job.last(LaunchGroup).reason.text


def test_the_first_step_of_all_ranks_makes_a_job_run() -> None:
    job = Transcript().started(step=None)
    assert job.state.phase == "starting" and not job.state.group.first_step_ns
    job.apply(StepCompleted(generation=7, step=3, step_s=0.5))
    assert job.state.phase == "starting" and job.state.step == -1
    assert job.state.step_s == 0.5
    job.wait(2)
    job.apply(StepCompleted(generation=1, step=3))
    assert job.state.reason.text == "all 4 ranks train"
    assert (job.state.phase, job.state.step, job.state.step_s) == ("running", 3, 0.5)
    assert job.state.group.first_step_ns == job.now_ns
    job.wait(2)
    job.step(2)
    assert job.state.step == 3 and job.state.group.first_step_ns == job.now_ns - 2 * SECOND


def test_a_first_step_during_a_stop_does_not_end_it() -> None:
    job = Transcript(spec(checkpoint={"storage": {"everySeconds": 60}})).started(step=None)
    job.exits(0, signal=9)
    job.step(0)
    assert job.state.phase == "recovering" and job.state.stop is not None
    assert job.state.group.first_step_ns and job.state.step == 0


def test_the_nodes_of_a_generation_are_whole_replica_groups() -> None:
    """Three shards on two workers per node: a replica covers no whole number of nodes."""
    job = Transcript(spec({"min": 3, "max": 3}, shard=3)).started("a", "b", "c")
    assert job.state.mesh is not None and job.state.mesh.describe() == "replicate 2 x shard 3"
    job.lose("b")
    job.succeed(RequestNodes)
    job.all_stopped(3)
    job.join("d")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "d", "c"]


def test_the_master_is_the_first_member() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.apply(FromNode("a", NodeJoined(facts=facts("a"))))
    job.join("b")
    membership = job.of(LaunchGroup)[0].membership
    assert (membership.master_address, membership.master_port) == ("ip-a", 29501)
    assert (membership.num_nodes, membership.workers_per_node) == (2, 2)
    assert membership.restart_count == 0


def test_a_deadline_starts_with_the_first_launch_and_is_not_extended_by_restarts() -> None:
    job = Transcript(spec(activeDeadlineSeconds=60))
    job.submit()
    job.succeed(RequestNodes)
    job.wait(30)
    assert "deadline" not in job.state.timers
    job.join("a", "b")
    due_ns = job.now_ns + 60 * SECOND
    assert job.state.timers["deadline"] == due_ns
    job.succeed(LaunchGroup)
    job.step(0)
    job.wait(20)
    job.exits(0, signal=9)
    job.all_stopped(3)
    assert job.state.timers["deadline"] == due_ns


def test_old_meshes_are_forgotten() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 100})).started()
    for _ in range(MESHES_KEPT + 2):
        job.exits(0, signal=9)
        job.all_stopped(None)
        job.succeed(LaunchGroup)
        job.wait(10)
    assert list(job.state.meshes) == list(range(4, MESHES_KEPT + 4))


def test_a_resize_that_cannot_be_reached_yet_stays_pending() -> None:
    job = Transcript(spec({"min": 1, "max": 2})).started()
    job.apply(ResizeRequested(nodes=4))
    job.succeed(RequestNodes)
    job.join("c")
    assert job.state.resize_pending
    job.wait(5.0)
    job.all_stopped(3)
    assert len(job.of(LaunchGroup)) == 3 and job.state.resize_pending
    job.succeed(LaunchGroup)
    job.step(4)
    job.join("d")
    assert job.one_reason(StopGroup) == "4 nodes are usable, 3 are used", "without the grow delay"
    job.all_stopped(5)
    assert len(job.of(LaunchGroup)) == 4 and not job.state.resize_pending


def test_a_stale_node_is_awaited_before_a_smaller_launch() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.state.generation = 4
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), generation=2, ranks=(0, 1))))
    job.join("b")
    job.state.supply.promised = Promises()
    job.apply(Tick())
    assert not job.of(LaunchGroup), "a stops the workers of an old generation"
    job.lose("a")
    job.fail(job.one(RequestNodes))
    assert [launch.node for launch in job.of(LaunchGroup)] == ["b"]


def test_a_launch_is_sent_again_to_the_nodes_that_have_not_answered() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    first, second = job.of(LaunchGroup)
    job.apply(ActionSucceeded(action_id=first.action_id))
    job.wait(14.9)
    assert not job.fresh
    job.wait(0.2)
    again = job.one(LaunchGroup)
    assert again.node == "b" and again.seats == second.seats and again.buddy == second.buddy
    assert again.membership == second.membership and again.node_rank == 1
    assert again.persist_every_steps == second.persist_every_steps
    job.apply(ActionSucceeded(action_id=second.action_id))
    assert list(job.state.group.launching) == ["b"], "the answer to the second one counts"
    job.apply(ActionSucceeded(action_id=again.action_id))
    assert job.state.group.launching == {} and not job.wait(60)


def test_all_nodes_that_have_started_their_workers_are_a_time_of_the_incident() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(3)
    first, second = job.of(LaunchGroup)
    job.apply(ActionSucceeded(action_id=first.action_id))
    assert job.state.incidents[0].started_ns is None
    job.wait(1)
    job.apply(ActionSucceeded(action_id=second.action_id))
    assert job.state.incidents[0].started_ns == job.now_ns
    job.wait(1)
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), generation=2, ranks=(0, 1))))
    assert job.state.incidents[0].started_ns == job.now_ns - SECOND
    assert job.state.phase == "recovering", "a recipe reports its first step"
