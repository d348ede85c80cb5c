"""Hangs, restart budgets, strikes, repeated errors, failed launches; the bounds of incidents."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    Reason,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import FaultInjected, FromNode, HangDetected, NodeLost
from holdfast.orchestrator.core.recovery import MAX_PLACES
from holdfast.orchestrator.protocol.facts import Exit, Stack, StagedShard
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import PreemptionNoticed, WorkerExited

from .harness import SECOND, Transcript, spec, stack


def test_a_hang_is_stopped_with_stacks_and_names_its_culprit() -> None:
    job = Transcript().started(step=10)
    job.apply(HangDetected(generation=1, ranks=(3, 0, 1, 2), evidence="rank 3 is stopped"))
    stops = job.of(StopGroup)
    assert all(stop.stacks for stop in stops)
    job.stopped("a", 10)
    job.stopped("b", 10, stacks=(stack(3), stack(2, True)))
    incident = job.state.incidents[0]
    assert (incident.failure_class, incident.culprit_node, incident.culprit_rank) == (
        "hang",
        "b",
        3,
    )
    assert incident.stacks == {3: "stack of 3", 2: "stack of 2"}
    assert job.state.ledger.restarts == {"hang": 1}


def test_a_hang_of_an_old_generation_is_ignored() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(3)
    assert not job.apply(HangDetected(generation=1, ranks=(0,), evidence="late"))


def test_the_same_exception_at_the_same_step_twice_fails_fast_with_its_traceback() -> None:
    job = Transcript().started()
    crash = {
        "code": 1,
        "step": 41,
        "error_type": "ValueError",
        "error_message": "bad sample",
        "traceback": 'Traceback\n  File "train.py", line 7, in step\nValueError: bad sample',
    }
    job.exits(1, **crash)
    job.all_stopped(41)
    assert len(job.of(LaunchGroup)) == 2
    job.succeed(LaunchGroup)
    job.exits(3, **crash)
    job.all_stopped(41)
    assert not job.of(LaunchGroup)
    assert job.one(PersistStep).step == 41, "the trained steps are not lost with the job"
    job.commit(41)
    finish = job.one(FinishJob)
    assert finish.outcome == "failed" and finish.reason.code == "user-error"
    assert "ValueError after 42 steps, twice" in finish.reason.text
    assert "line 7" in job.state.traceback


def test_the_same_exception_at_another_step_is_only_charged() -> None:
    job = Transcript().started()
    for step in (4, 5, 6):
        job.exits(1, code=1, step=step, error_type="ValueError", error_message="x")
        job.all_stopped(step)
        assert job.of(LaunchGroup)
        job.succeed(LaunchGroup)
    assert job.state.ledger.restarts == {"user": 3}
    job.exits(1, code=1, step=7, error_type="ValueError", error_message="x")
    job.all_stopped(7)
    job.commit(7)
    assert job.one(FinishJob).reason.code == "budget"


@pytest.mark.parametrize("error", ["WrongModel", "WrongOptimizer", "WrongSharding"])
def test_a_checkpoint_of_another_model_fails_the_job_at_once(error: str) -> None:
    job = Transcript().started(step=None)
    job.exits(0, code=1, step=-1, error_type=error, error_message="F32[64], not F32[32]")
    job.all_stopped()
    finish = job.one(FinishJob)
    assert (finish.outcome, finish.reason.code) == ("failed", "user-error")
    assert "F32[64], not F32[32]" in finish.reason.text


def test_the_mesh_follows_a_model_that_its_script_shards_over_all_ranks() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, shard="auto", script=True)).started(step=None)
    assert job.last(LaunchGroup).membership.mesh == Mesh(replicate=2, shard=2)
    raised = {"error_type": "ShardedOverWorld", "error_message": "4 parts"}
    job.exits(0, code=1, step=-1, **raised)
    job.all_stopped()
    assert job.last(LaunchGroup).membership.mesh == Mesh(shard=4)
    assert job.last(LaunchGroup).reason.code == "resize"
    incident = job.state.incidents[-1]
    assert (incident.purpose, incident.failure_class) == ("resize", None)
    assert job.state.ledger.restarts == {}
    assert "the mesh follows it" in incident.title
    job.succeed(LaunchGroup)
    job.apply(NodeLost(node="b", cause="silent"))
    job.all_stopped()
    job.wait(60)
    assert job.last(LaunchGroup).membership.mesh == Mesh(shard=2), "also on another size"


def test_sizes_in_the_spec_are_not_changed_by_the_model() -> None:
    job = Transcript(spec(shard=2, script=True)).started(step=None)
    job.exits(0, code=1, step=-1, error_type="ShardedOverWorld", error_message="4 parts")
    job.all_stopped()
    assert job.one(FinishJob).reason.code == "user-error"


def test_a_budget_is_a_window() -> None:
    job = Transcript(
        spec(recovery={"budgets": {"infrastructure": {"restarts": 1, "windowSeconds": 60}}})
    ).started()
    for _ in range(3):
        job.exits(2, signal=9)
        job.all_stopped(5)
        assert job.of(LaunchGroup), job.state.reason
        job.succeed(LaunchGroup)
        job.wait(61)
    job.exits(2, signal=9)
    job.all_stopped(5)
    job.succeed(LaunchGroup)
    job.exits(2, signal=9)
    job.all_stopped(5)
    job.commit(5)
    assert job.one(FinishJob).outcome == "failed"
    assert "infrastructure budget is used up" in job.state.reason.text


def test_ten_lost_nodes_do_not_use_up_the_user_budget() -> None:
    job = Transcript(spec({"min": 1, "max": 2})).started()
    for number in range(10):
        job.lose(job.state.group.members[0])
        job.succeed(RequestNodes)
        job.all_stopped(number)
        job.join(f"n{number}")
        assert job.of(LaunchGroup)
        job.succeed(LaunchGroup)
    assert job.state.ledger.restarts == {"infrastructure": 10}


def test_a_node_with_enough_strikes_is_cordoned() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, recovery={"badNodeStrikes": 2})).started()
    job.exits(2, signal=9)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    job.step(4)
    job.exits(3, signal=9)
    job.stopped("a", 5)
    job.stopped("b", 5)
    request = job.one(RequestNodes)
    assert (request.count, request.avoid) == (1, ("b",))
    job.succeed(RequestNodes)
    job.join("c")
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "c"]
    job.succeed(LaunchGroup)
    job.step(6)
    assert job.one(ReleaseNode).node == "b"


def test_a_node_that_lacks_a_gpu_is_replaced_at_once() -> None:
    job = Transcript(spec({"min": 2, "max": 2, "spares": 1})).started("a", "b", "c", step=40)
    lacking = {"code": 1, "error_type": "DeviceMissing", "error_message": "got 0 GPUs; expected 2"}
    job.exits(2, signal=9, step=40)
    job.all_stopped(40)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["a", "b"]
    job.succeed(LaunchGroup)
    job.exits(3, step=-1, **lacking)
    job.exits(2, step=-1, **lacking)
    job.all_stopped(40)
    incident = job.state.incidents[-1]
    assert (incident.failure_class, incident.rule) == ("infrastructure", "device-missing")
    assert (incident.culprit_node, incident.culprit_rank) == ("b", 3)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"], "the spare has its position"
    assert launches[0].membership.restore.step == 40
    assert job.state.catalog.distrusted == {}, "the state is not to blame"
    job.succeed(LaunchGroup)
    job.step(41)
    assert job.state.phase == "running"
    assert job.one(ReleaseNode).node == "b"
    assert "b cannot be used: worker 3 on b raised DeviceMissing" in job.state.supply.released["b"]
    assert job.state.ledger.restarts == {"infrastructure": 2}


def test_a_cordoned_node_without_a_restore_point_is_released_at_once() -> None:
    job = Transcript(spec({"min": 1, "max": 1})).started("a", step=None)
    job.exits(0, code=1, error_type="DeviceMissing", error_message="got 1 GPU; expected 2")
    job.all_stopped()
    assert job.one(ReleaseNode).node == "a"
    assert job.one(RequestNodes).avoid == ("a",)
    job.succeed(RequestNodes, ReleaseNode)
    assert [launch.node for launch in job.join("b") if isinstance(launch, LaunchGroup)] == ["b"]


def test_a_cordoned_node_is_released_once_its_state_is_in_storage() -> None:
    """The replacement may need the GPUs that it holds."""
    job = Transcript(spec({"min": 1, "max": 1})).started("a", step=40)
    job.exits(0, code=1, error_type="DeviceMissing", error_message="got 1 GPU; expected 2")
    job.all_stopped(40)
    assert {action.node: action.step for action in job.of(PersistStep)} == {"a": 40}
    job.fail(job.one(RequestNodes))
    assert not job.of(ReleaseNode)
    job.written(40)
    job.succeed(CommitManifest)
    assert job.one(ReleaseNode).node == "a"
    job.join("b")
    restore = job.of(LaunchGroup)[0].membership.restore
    assert restore is not None and (restore.step, bool(restore.directory)) == (40, True)


def test_an_injected_fault_is_neither_charged_nor_a_strike() -> None:
    job = Transcript().started()
    job.apply(FaultInjected(kind="kill-worker", node="b", rank=2))
    job.exits(2, signal=9)
    job.all_stopped(3)
    assert job.state.incidents[0].fault_injected
    assert job.state.ledger.restarts == {} and job.state.ledger.strikes == {}


def test_a_node_with_a_preemption_notice_is_replaced_before_it_leaves() -> None:
    job = Transcript().started()
    job.apply(FromNode("b", PreemptionNoticed(detail="spot")))
    assert job.one(RequestNodes).count == 1
    assert not job.of(StopGroup), "it trains until another node can replace it"
    job.succeed(RequestNodes)
    job.join("c")
    assert [stop.reason.code for stop in job.of(StopGroup)] == ["preemption"] * 2
    job.all_stopped(30)
    launches = job.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    job.succeed(LaunchGroup)
    job.step(31)
    assert job.one(ReleaseNode).node == "b", "released once its memory is not needed"
    assert job.state.ledger.restarts == {"preemption": 1}


def test_a_failed_launch_is_charged_to_its_node() -> None:
    job = Transcript().started(step=None)
    job.exits(0, signal=9)
    job.all_stopped(None)
    job.fail(job.of(LaunchGroup)[1], "cannot fork")
    job.all_stopped(None)
    incident = job.state.incidents[-1]
    assert (incident.rule, incident.culprit_node) == ("launch-failed", "b")


def test_a_launch_without_an_answer_is_sent_again_and_then_fails() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    job.wait(15.1)
    assert len(job.of(LaunchGroup)) == 2
    job.wait(15.1)
    assert len(job.of(StopGroup)) == 2


def test_events_of_an_old_generation_are_only_noted() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    job.all_stopped(3)
    before = len(job.actions)
    late = Exit(rank=0, signal=9)
    job.apply(FromNode("a", WorkerExited(generation=1, exit=late)))
    assert job.persisted(3, 0, generation=1) == []
    assert len(job.actions) == before
    assert len(job.state.notes) == 2


def test_stacks_of_an_incident_are_bounded_and_suspects_are_kept_first() -> None:
    job = Transcript().started(step=5)
    job.apply(HangDetected(generation=1, ranks=(3, 0, 1, 2), evidence="quiet"))
    text = "x" * (limits.MAX_INCIDENT_STACK_BYTES // 2)
    stacks = {rank: Stack(rank=rank, text=text, in_collective=rank != 1) for rank in range(4)}
    job.stopped("a", 5, stacks=(stacks[0], stacks[1]))
    job.stopped("b", 5, stacks=(stacks[2], stacks[3]))
    # Rank 1 is not in a collective; rank 3 is the likeliest suspect of the others.
    assert list(job.state.incidents[-1].stacks) == [1, 3]


def test_one_stack_is_kept_however_long_it_is() -> None:
    job = Transcript().started(step=5)
    job.apply(HangDetected(generation=1, ranks=(3,), evidence="quiet"))
    text = "x" * (2 * limits.MAX_INCIDENT_STACK_BYTES)
    job.stopped("a", 5, stacks=(Stack(rank=0, text=text, in_collective=True),))
    job.stopped("b", 5, stacks=(Stack(rank=3, text=text, in_collective=True),))
    assert list(job.state.incidents[-1].stacks) == [3]


def test_only_the_newest_interruptions_keep_their_tracebacks() -> None:
    job = Transcript().started(step=0)
    for number in range(limits.MAX_INCIDENTS_IN_FULL + 3):
        how = {"error_type": "E", "error_message": f"{number}", "traceback": "Traceback"}
        job.exits(1, code=1, step=number, **how)
        job.all_stopped(number)
        job.succeed(LaunchGroup)
        job.step(number + 1)
        # No budget shall be used up.
        job.state.ledger.charges.clear()
        job.state.ledger.strikes.clear()
        job.state.ledger.cordoned.clear()
    kept = [incident.traceback for incident in job.state.incidents]
    assert kept == [""] * 3 + ["Traceback"] * limits.MAX_INCIDENTS_IN_FULL
    assert all(incident.title for incident in job.state.incidents)


def test_the_title_of_an_incident_has_the_signal_or_the_exit_code() -> None:
    for how, text in (({"signal": 9}, "signal 9"), ({"code": 3}, "exit code 3")):
        job = Transcript().started()
        job.exits(2, **how)
        assert job.one_reason(StopGroup) == f"worker 2 on b ended with {text}"
        assert job.state.phase == "recovering"


def test_only_the_first_exit_of_a_rank_counts() -> None:
    job = Transcript().started(step=3)
    job.exits(2, signal=9, step=3)
    assert not job.exits(2, code=1, error_type="E")
    exits = (Exit(rank=2, signal=15, by_us=True), Exit(rank=3, signal=9, by_us=True, step=4))
    job.stopped("a", 3)
    job.stopped("b", 3, exits=exits)
    assert job.state.incidents[0].rule == "outside-signal"


def test_an_exit_reported_with_the_stop_counts_as_evidence() -> None:
    job = Transcript().started(step=3)
    job.exits(2, code=1, secondary=True)
    job.stopped("a", 3, exits=(Exit(rank=0, signal=9, step=3),))
    job.stopped("b", 3)
    incident = job.state.incidents[0]
    assert incident.rule == "outside-signal"
    assert (incident.culprit_node, incident.culprit_rank) == ("a", 0)


@pytest.mark.parametrize(("after_s", "injected"), [(60.0, True), (60.1, False)])
def test_a_failure_within_a_minute_after_a_fault_injection_was_caused_by_it(
    after_s: float, injected: bool
) -> None:
    job = Transcript().started()
    job.apply(FaultInjected(kind="kill-worker", node="b", rank=2))
    job.wait(after_s)
    job.exits(2, signal=9)
    job.all_stopped(3)
    assert job.state.incidents[0].fault_injected == injected
    assert job.state.ledger.restarts == ({} if injected else {"infrastructure": 1})
    assert job.state.ledger.injected_faults == {}


def test_a_fault_injection_explains_only_failures_of_its_node() -> None:
    job = Transcript().started()
    job.apply(FaultInjected(kind="kill-worker", node="a", rank=0))
    job.exits(2, signal=9)
    job.all_stopped(3)
    assert not job.state.incidents[0].fault_injected and job.state.ledger.injected_faults


@pytest.mark.parametrize(("after_s", "strikes"), [(99.9, 2), (100.0, 1)])
def test_strikes_are_counted_within_the_window_of_the_budget(after_s: float, strikes: int) -> None:
    budget = {"infrastructure": {"restarts": 10, "windowSeconds": 100}}
    job = Transcript(spec(recovery={"budgets": budget, "badNodeStrikes": 5})).started()
    for step in (3, 4):
        job.exits(2, signal=9)
        job.all_stopped(step)
        job.succeed(LaunchGroup)
        job.step(step)
        job.wait(after_s) if step == 3 else None
    assert len(job.state.ledger.strikes["b"]) == strikes
    assert len(job.state.ledger.charges["infrastructure"]) == strikes
    assert job.state.ledger.restarts == {"infrastructure": 2}


def test_a_cordon_is_noted_and_a_lost_node_gets_none() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 1})).started()
    job.exits(2, signal=9)
    job.all_stopped(3)
    assert job.state.ledger.cordoned == {"b": "b caused 1 incident"}
    assert (job.now_ns, "b caused 1 incident") in job.state.notes
    assert "replacement" in job.state.timers
    other = Transcript(spec(recovery={"badNodeStrikes": 1})).started()
    other.lose("b")
    other.stopped("a", 3)
    assert other.state.ledger.cordoned == {} and other.state.ledger.strikes["b"]


@pytest.mark.parametrize("message", ["train.py: error: unrecognized arguments: --lt", ""])
@pytest.mark.parametrize("step", [None, 3])
def test_wrong_arguments_end_the_job_at_once(message: str, step: int | None) -> None:
    job = Transcript(spec(script=True)).started(step=step)
    job.exits(2, code=2, error_message=message)
    job.all_stopped(step)
    assert (job.state.phase == "failed") == bool(message and step is None)
    if job.state.phase == "failed":
        assert job.state.reason.code == "user-error" and message in job.state.reason.text


def test_failures_of_users_and_of_the_network_are_no_strikes() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 1})).started()
    job.exits(2, code=3)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    job.exits(2, code=1, error_type="ConnectionResetError")
    job.all_stopped(3)
    assert [one.rule for one in job.state.incidents] == ["exit-code", "network"]
    assert job.state.ledger.strikes == {} and job.state.ledger.cordoned == {}


def test_a_hang_is_a_strike_of_the_suspects_node() -> None:
    job = Transcript(spec(recovery={"badNodeStrikes": 1})).started()
    job.apply(HangDetected(generation=1, ranks=(2,), evidence="rank 2 is stopped"))
    job.all_stopped(3)
    assert list(job.state.ledger.cordoned) == ["b"]


def test_a_hang_is_ignored_while_a_generation_stops() -> None:
    job = Transcript().started()
    job.exits(0, signal=9)
    assert not job.apply(HangDetected(generation=1, ranks=(2,), evidence="quiet"))
    job.all_stopped(3)
    assert job.state.incidents[0].rule == "outside-signal"


def test_stacks_extend_the_time_to_stop() -> None:
    job = Transcript().started()
    job.apply(HangDetected(generation=1, ranks=(2,), evidence="rank 2 is stopped"))
    assert job.state.phase == "recovering"
    assert job.state.reason == Reason("hang", "no progress: rank 2 is stopped")
    limit_s = limits.STOP_TIMEOUT_S + limits.STACK_TIMEOUT_S
    assert job.state.timers["stop"] == job.now_ns + round(limit_s * SECOND)


def test_nodes_with_gpus_have_longer_to_stop() -> None:
    for resources, limit_s in (
        ({"gpu": 1}, limits.STOP_TIMEOUT_GPU_S), ({"gpu": 0}, limits.STOP_TIMEOUT_S),
    ):  # fmt: skip
        job = Transcript(spec(resources=resources)).started()
        job.exits(0, signal=9)
        assert job.state.timers["stop"] == job.now_ns + round(limit_s * SECOND)


def test_the_oldest_of_many_places_is_forgotten() -> None:
    generous = {"budgets": {"user": {"restarts": 10_000}}}
    job = Transcript(spec(recovery=generous)).started()
    for number in range(MAX_PLACES + 1):
        job.exits(1, code=1, step=number, error_type="E", error_message="m")
        job.all_stopped(None)
        job.succeed(LaunchGroup)
    assert len(job.state.ledger.failed_at) == MAX_PLACES
    assert next(key[3] for key in job.state.ledger.failed_at) == 1
    job.exits(1, code=1, step=0, error_type="E", error_message="m")
    job.all_stopped(None)
    assert job.state.phase == "recovering", "it counts as the first"


def test_a_state_is_distrusted_for_failures_before_the_first_step() -> None:
    job = Transcript().started(step=3)
    staged = tuple(StagedShard(3, 1, shard, 2, 1) for shard in range(2))

    def fails(**how: Any) -> dict[tuple[int, int], int]:
        job.exits(0, **how)
        for node in ("a", "b"):
            job.stopped(node, staged=staged)
        job.succeed(LaunchGroup)
        return job.state.catalog.distrusted

    crash = {"code": 1, "error_type": "E"}
    assert fails(step=3, error_message="0", **crash) == {}, "the generation had finished a step"
    assert fails(signal=9) == {}, "a kill says nothing about the state"
    assert fails(step=3, error_message="1", **crash) == {(3, 1): 1}
    assert fails(step=-1, error_message="2", **crash) == {(3, 1): 2}


def test_an_incident_keeps_the_facts_of_its_interruption() -> None:
    job = Transcript().started(step=3)
    job.wait(1)
    job.exits(2, signal=9, step=5)
    began_ns = job.now_ns
    job.wait(1)
    job.stopped("a", 4)
    job.wait(1)
    job.stopped("b", 4)
    job.wait(1)
    job.succeed(LaunchGroup)
    job.wait(1)
    job.step(5)
    (incident,) = job.state.incidents
    assert (incident.number, incident.at_ns, incident.purpose) == (1, began_ns, "failure")
    assert (incident.generation_before, incident.generation_after) == (1, 2)
    assert (incident.world_size_before, incident.world_size_after) == (4, 4)
    times = (incident.stopped_ns, incident.launched_ns, incident.started_ns, incident.first_step_ns)
    assert times == tuple(began_ns + after * SECOND for after in (2, 2, 3, 4))
    assert (incident.step_before, incident.resumed_after_step) == (4, 4)
    assert incident.decision == "restart on the same 2 nodes, from memory after 5 steps"


def test_an_interruption_before_the_first_step_belongs_to_the_incident_before() -> None:
    job = Transcript().started(step=3)
    job.exits(2, signal=9)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    first, generation = job.state.incidents[0], job.state.incidents[0].generation_after
    job.exits(2, signal=9)
    job.all_stopped(3)
    job.succeed(LaunchGroup)
    assert first.generation_after == generation == 2
    assert job.state.num_incidents == 2
    job.step(4)
    assert first.first_step_ns is None and job.state.incidents[1].first_step_ns == job.now_ns


def test_the_reason_of_a_failure_is_its_title_and_class() -> None:
    job = Transcript(spec({"min": 2, "max": 2})).started(step=3)
    job.exits(2, code=3, step=3)
    job.stopped("a", 3)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    assert job.state.incidents[0].title == "worker 2 on b ended with exit code 3"
    assert job.state.incidents[0].failure_class == "user"


def test_a_launch_failure_after_another_failure_is_only_added() -> None:
    job = Transcript().started(step=None)
    job.exits(0, signal=9)
    job.all_stopped(None)
    launch = job.of(LaunchGroup)
    job.fail(launch[0], "first")
    job.fail(launch[1], "second")
    job.all_stopped(None)
    incident = job.state.incidents[-1]
    assert (incident.culprit_node, incident.evidence) == ("a", "first")


def test_a_failed_launch_without_a_detail_says_so_and_a_late_failure_does_not_count() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    launch = job.of(LaunchGroup)[0]
    job.wait(15.1)
    assert job.one_reason(LaunchGroup) == "a has not answered its launch within 15 s"
    again = job.of(LaunchGroup)[0]
    assert not job.fail(launch, "late"), "it was sent again under another id"
    job.fail(again, "")
    assert job.one_reason(StopGroup) == "a could not start its workers: no detail given"


def test_the_launch_of_a_script_may_wait_for_an_import_before_it_is_sent_again() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, shard="auto", script=True))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    job.of(LaunchGroup)
    job.wait(limits.IMPORT_WAIT_S + 1.0)
    assert not job.of(LaunchGroup)
    job.wait(limits.LAUNCH_TIMEOUT_S)
    assert [launch.reason.text for launch in job.of(LaunchGroup)] == [
        f"{node} has not answered its launch within 35 s" for node in ("a", "b")
    ]


@pytest.mark.parametrize("script, grace_s", [(True, limits.SAVE_GRACE_S), (False, 0.0)])
def test_survivors_of_a_script_may_end_a_save(script: bool, grace_s: float) -> None:
    job = Transcript(spec({"min": 1, "max": 2}, shard="auto", script=script)).started()
    job.exits(0, signal=9)
    assert {stop.save_grace_s for stop in job.of(StopGroup)} == {grace_s}


def test_in_a_hang_no_save_is_waited_for() -> None:
    job = Transcript(spec({"min": 1, "max": 2}, shard="auto", script=True)).started()
    job.apply(HangDetected(generation=1, ranks=(0,), evidence="rank 0 is stopped"))
    assert {stop.save_grace_s for stop in job.of(StopGroup)} == {0.0}
