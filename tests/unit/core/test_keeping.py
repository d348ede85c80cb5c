"""Conditions under which workers keep their processes, and the cost of failures then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.orchestrator.core import events as e
from holdfast.orchestrator.core import keeping
from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes, StopGroup
from holdfast.orchestrator.protocol.facts import AGAIN, Exit, StagedShard
from holdfast.orchestrator.protocol.messages import WorkerExited

from .harness import CommitManifest, PersistStep, Transcript, spec

NEVER = {"keepProcesses": "never"}
KEEPS = spec()


def kept_after_a_kill(job: Transcript) -> None:
    job.exits(0, signal=9, step=3)
    job.stopped("a", 3, kept=(1,))
    job.stopped("b", 3, kept=(2, 3))


def test_the_next_generation_goes_on_with_what_was_kept() -> None:
    job = Transcript(KEEPS).started(step=3)
    job.exits(0, signal=9, step=3)
    assert all(stop.keep for stop in job.of(StopGroup))
    job.stopped("a", 3, kept=(1,))
    job.stopped("b", 3, kept=(2, 3))
    launch = job.of(LaunchGroup)[0]
    assert launch.membership.kept_from == 1 and launch.membership.generation == 2
    assert launch.reason.text.endswith("3 of 4 workers keep their process")
    job.succeed(LaunchGroup)
    job.step(4)
    assert job.state.ledger.restarts == {"infrastructure": 1}
    assert keeping.describe(job.state, {0: True}) == "survivors keep their process"
    assert keeping.describe(job.state, {3: "X", 0: "NCCL"}) == "all workers start again: NCCL"
    assert keeping.describe(job.state, {}) == ""
    some = keeping.describe(job.state, {0: True, 2: "X", 3: "X", 1: "it is compiled"})
    assert some == "survivors keep their process, but not ranks 1-3: it is compiled"
    assert job.replayed().state.keeping == job.state.keeping


@pytest.mark.parametrize("document", [spec(recovery=NEVER), spec(resources={"gpu": 1})])
def test_nothing_is_kept_where_that_is_unwanted_or_unproved(document: dict[str, object]) -> None:
    job = Transcript(document).started(step=3)
    job.exits(0, signal=9, step=3)
    assert not any(stop.keep for stop in job.of(StopGroup))


def test_a_generation_that_has_not_trained_keeps_nothing_and_nor_does_a_suspended_job() -> None:
    job = Transcript(KEEPS).started(step=None)
    job.exits(0, signal=9)
    assert job.of(StopGroup) and not any(stop.keep for stop in job.of(StopGroup))
    job = Transcript(KEEPS).started(step=3)
    job.apply(e.SuspendRequested())
    job.wait(10)
    assert job.all(StopGroup) and not any(stop.keep for stop in job.all(StopGroup))


@pytest.mark.parametrize("why", ["", "it is never", "a GradScaler is in use"])
def test_a_decision_says_why_no_process_is_kept_if_a_worker_has_said_so(why: str) -> None:
    job = Transcript(spec(recovery=NEVER) if "never" in why else KEEPS).started(step=3)
    job.exits(0, signal=9, step=3)
    job.stopped("a", 3, why_not=why)
    job.stopped("b", 3)
    expected = f"; all workers start again: {why}" if "in use" in why else "after 4 steps"
    assert job.one_reason(LaunchGroup).endswith(expected) and not job.state.keeping.why_not


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_for_new_code_explains_nothing_but_a_failure_before_it_does(fails: bool) -> None:
    job = Transcript(KEEPS).started(step=3)
    if fails:
        job.exits(0, signal=9, step=3)
    job.apply(e.AgainRequested())
    job.stopped("a", 3, kept=(1,) * fails, why_not="compiled")
    job.stopped("b", 3)
    expected = "; all workers start again: the code is new" if fails else "after 4 steps"
    assert job.one_reason(LaunchGroup).endswith(expected)


@pytest.mark.parametrize(
    "why", ["kept processes end after 120 s", "none of these nodes has a kept process"]
)
def test_a_launch_that_comes_too_late_for_kept_processes_says_so(why: str) -> None:
    job = Transcript(spec({"min": 2, "max": 2})).started(step=3)
    job.commit(3)
    job.lose("a")
    job.stopped("b", 3, kept=(2, 3))
    job.lose("b") if "none" in why else job.wait(120)
    job.succeed(RequestNodes)
    job.join("c", "d")
    assert job.one_reason(LaunchGroup).endswith(f"; all workers start again: {why}")


def test_a_decision_says_why_kept_processes_cannot_go_on_or_why_others_are_not_kept() -> None:
    again = "; all workers start again: "
    job = Transcript(spec(shard="world", recovery={"replacementWaitSeconds": 0})).started(step=3)
    job.commit(3)
    job.lose("a")
    job.stopped("b", 3, kept=(2, 3))
    assert job.one_reason(LaunchGroup).endswith(f"{again}the model is divided in another way")
    job = Transcript(KEEPS).started(step=3)
    job.exits(1, signal=9, step=3)
    for step, expected in ((None, f"{again}no state is restored"), (4, "others do not: compiled")):
        job.stopped("a", step, kept=(0,))
        job.stopped("b", step, why_not="compiled")
        assert job.one_reason(LaunchGroup).endswith(expected)
        job.succeed(LaunchGroup)
        job.step(4)
        job.exits(1, signal=9, step=4)


@pytest.mark.parametrize("grows", [False, True])
def test_processes_whose_script_has_a_fixed_size_are_forked_in_another_size_without_a_failed_try(
    grows: bool,
) -> None:
    why = {"fixed_size": "the script reads world_size outside its attempts"}
    job = Transcript(KEEPS).started("a", "b", step=3)
    job.apply(e.ResizeRequested(nodes=1))
    job.wait(5)
    job.stopped("a", 3, kept=(0, 1), **({} if grows else why))
    job.stopped("b", 3, kept=(2, 3))
    launch = job.all(LaunchGroup)[-1]
    assert launch.membership.kept_from == (1 if grows else 0)
    assert launch.reason.text.endswith("outside its attempts") != grows
    job.succeed(LaunchGroup)
    job.step(5)
    job.apply(e.ResizeRequested(nodes=2))
    job.join("c")
    job.wait(5)
    job.stopped("a", 6, kept=(0, 1), **(why if grows else {}))
    launch = job.all(LaunchGroup)[-1]
    assert launch.membership.world_size == 4 and launch.membership.kept_from == 0
    assert launch.reason.text.endswith("outside its attempts") == grows
    assert job.state.keeping.num_failures == 0 and not job.state.keeping.fixed_size


@pytest.mark.parametrize("kept", [(0, 1), ()])
def test_a_job_that_grows_keeps_processes_that_were_made_with_several_replicas(
    kept: tuple[int, ...],
) -> None:
    """Processes of a forked smaller world have no process groups over replicas."""
    job = Transcript(spec()).started(step=3)
    job.apply(e.ResizeRequested(nodes=1))
    job.wait(5)
    assert all(stop.keep for stop in job.all(StopGroup)[-2:])
    job.stopped("a", 3, kept=kept)
    job.stopped("b", 3, kept=tuple(rank + 2 for rank in kept))
    membership = job.all(LaunchGroup)[-1].membership
    assert membership.world_size == 2 and membership.kept_from == (1 if kept else 0)
    job.succeed(LaunchGroup)
    job.step(5)
    job.apply(e.ResizeRequested(nodes=2))
    job.join("c")
    job.wait(5)
    stop = job.all(StopGroup)[-1]
    assert stop.keep and stop.node == "a"
    job.stopped("a", 6, kept=(0, 1))
    launches = job.all(LaunchGroup)[-2:]
    assert [one.node for one in launches] == ["a", "c"]
    assert {one.membership.kept_from for one in launches} == {2 if kept else 0}
    assert ("other process groups than kept ones" in launches[0].reason.text) != bool(kept)


def test_a_smaller_world_keeps_processes_if_it_has_no_new_ones() -> None:
    recovery = {"keepProcesses": "auto", "replacementWaitSeconds": 0}
    for kept, expected in (((2, 3), 1), ((2,), 0)):
        job = Transcript(spec(recovery=recovery)).started(step=3)
        job.lose("a")
        job.stopped("b", 3, kept=kept)
        launch = job.one(LaunchGroup)
        assert launch.membership.world_size == 2 and launch.membership.kept_from == expected
        assert ("smaller world needs whole replicas" in launch.reason.text) != bool(expected)


def test_kept_processes_that_cannot_go_on_cost_no_restart_and_all_are_forked() -> None:
    job = Transcript(KEEPS).started(step=3)
    error = Exit(rank=1, code=1, error_type="NotKept", error_message="ranks have moved")
    for failures in (1, 2):
        kept_after_a_kill(job)
        assert job.of(LaunchGroup)[0].membership.kept_from
        job.succeed(LaunchGroup)
        job.exits(1, code=1, error_type=error.error_type, error_message=error.error_message)
        assert not any(stop.keep for stop in job.of(StopGroup)), "it has not trained"
        job.all_stopped()
        assert not job.of(LaunchGroup)[0].membership.kept_from
        assert job.state.incidents[-1].rule == "not-kept"
        assert job.state.ledger.restarts == {"infrastructure": failures}
        assert not job.state.ledger.failed_at
        job.succeed(LaunchGroup)
        job.step(3 + failures)
    assert "ranks have moved" in job.state.keeping.why_never
    said = keeping.describe(job.state, {0: True})
    assert said.startswith("all workers start again: worker 1 on a")
    job.exits(2, signal=9, step=5)
    assert not any(stop.keep for stop in job.of(StopGroup))
    job.all_stopped(5)
    assert f"; {said}" in job.one_reason(LaunchGroup)


def test_a_script_that_cannot_run_again_is_not_charged_and_no_process_is_kept_any_more() -> None:
    job = Transcript(KEEPS).started(step=3)
    job.exits(0, signal=9, step=3)
    job.stopped("a", 3, again=(1,), why_not="it is a script")
    job.stopped("b", 3, again=(2, 3))
    assert f"; all workers start again: it is a script; {AGAIN}" in job.one_reason(LaunchGroup)
    assert not job.of(LaunchGroup)[0].membership.kept_from
    job.succeed(LaunchGroup)
    job.exits(1, code=1, error_type="RuntimeError", error_message="it was defined twice")
    job.all_stopped()
    assert job.state.incidents[-1].rule == "not-kept"
    assert job.state.ledger.restarts == {"infrastructure": 1}
    assert "it was defined twice" in job.state.keeping.why_never
    job.succeed(LaunchGroup)
    job.exits(1, code=1, error_type="RuntimeError", error_message="it is the script's own")
    job.all_stopped()
    assert job.state.incidents[-1].failure_class == "user"


def test_another_fault_while_kept_processes_go_on_is_charged() -> None:
    job = Transcript(KEEPS).started(step=3)
    kept_after_a_kill(job)
    job.succeed(LaunchGroup)
    job.exits(2, signal=9, step=3)
    job.all_stopped(3)
    assert job.state.ledger.restarts == {"infrastructure": 2}
    assert not job.state.keeping.why_never


def test_replicas_that_differ_are_an_incident_and_nothing_is_kept_any_more() -> None:
    job = Transcript(KEEPS).started(step=3)
    kept_after_a_kill(job)
    job.succeed(LaunchGroup)
    job.step(4)
    job.exits(3, code=1, error_type="ReplicasDiverged", error_message="replicas differ", step=4)
    job.all_stopped(4)
    assert job.state.incidents[-1].rule == "diverged"
    assert not job.of(LaunchGroup)[0].membership.kept_from
    assert "replicas differ" in job.state.keeping.why_never
    incident = job.state.incidents[-1]
    assert (incident.culprit_node, incident.culprit_rank) == ("", None)


Acts = tuple[Callable[[Transcript], object], ...]
TWO_NODES = spec({"min": 2, "max": 2}, recovery={"capacityTimeoutSeconds": 60})
ENDS: dict[str, Acts] = {
    "cancelled": (lambda job: job.apply(e.CancelRequested()),),
    "suspended": (lambda job: job.apply(e.SuspendRequested()),),
    "failed": (lambda job: job.lose("a"),),
}


def stopped_as_replicas_differ(
    job: Transcript, *, older: bool, before: Acts = (), then: Acts = ()
) -> None:
    """`older`: memory still has a state of forked processes. `before`, `then`: the error."""
    job.started(step=3).commit(2)
    staged: dict[str, tuple[StagedShard, ...]] = {"a": (), "b": ()}
    for num_kept in (0, 1):
        for node in staged if older or num_kept else ():
            staged[node] += job.inventory(node, 3)
        kept_after_a_kill(job)
        job.succeed(LaunchGroup)
        job.step(4)
    for act in before:
        act(job)
    differs = Exit(rank=3, code=1, error_type="ReplicasDiverged", error_message="differ", step=4)
    if job.state.stop is None:
        job.apply(e.FromNode("b", WorkerExited(generation=3, exit=differs)))
    for act in then:
        act(job)
    assert job.state.stop is not None
    kept = {"kept": (1,) if job.all(StopGroup)[-1].keep else ()}
    for node in list(job.state.stop.waiting):
        how: dict[str, Any] = {"exits": (differs,)} if node == "b" else kept
        job.stopped(node, staged=job.inventory(node, 4) + staged[node], **how)


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_replicas_that_differ_restore_no_state_that_kept_processes_have_staged(
    *, older: bool, killed: bool
) -> None:
    """Each replica would restore its own. `killed`: another worker has failed before."""
    job, kill = Transcript(KEEPS), (lambda job: job.exits(2, signal=9, step=4),)
    stopped_as_replicas_differ(job, older=older, before=kill if killed else ())
    launch = job.of(LaunchGroup)[0]
    assert job.all(StopGroup)[-1].keep == killed and not launch.membership.kept_from
    assert launch.reason.text.endswith("ReplicasDiverged: differ")
    restore = launch.membership.restore
    assert restore is not None and (restore.step, restore.generation) == (3 if older else 2, 1)
    assert bool(restore.directory) != older


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("when", ["before", "then"])
@pytest.mark.parametrize("end", ENDS)
def test_a_job_that_ends_or_waits_writes_no_state_in_which_replicas_differ(
    end: str, when: str, *, older: bool
) -> None:
    """A rank may find the difference before the interruption, or while its workers are stopped."""
    job = Transcript(TWO_NODES)
    stopped_as_replicas_differ(job, older=older, **{when: ENDS[end]})
    job.wait(200 if end == "failed" else 0)
    writes = {(order.step, order.generation) for order in job.all(PersistStep)}
    assert writes == ({(3, 1)} if older else set())
    for shard in (0, 1) if older else ():
        job.persisted(3, shard, generation=1)
    job.succeed(CommitManifest)
    assert job.state.phase == end and job.state.catalog.committed[-1].key == (3 if older else 2, 1)


def test_a_write_that_has_begun_does_not_make_a_checkpoint_of_replicas_that_differ() -> None:
    job = Transcript(TWO_NODES)
    begun: Acts = (lambda job: job.persisted(4, 0),)
    stopped_as_replicas_differ(job, older=False, before=begun, then=ENDS["failed"])
    for again in (False, True):
        job.apply(e.ControllerStarted(incarnation=2)) if again else job.persisted(4, 1)
        assert "state after 5 steps is not committed" in job.state.notes[-1][1]
    assert [commit.step for commit in job.all(CommitManifest)] == [2]


def test_an_error_of_that_name_in_a_job_that_kept_nothing_is_charged() -> None:
    job = Transcript(KEEPS).started(step=3)
    job.exits(3, code=1, error_type="ReplicasDiverged", step=4)
    job.all_stopped(4)
    assert job.state.ledger.restarts == {"infrastructure": 1}


@pytest.mark.parametrize(("lost", "kept"), [(("a", "d"), 0), (("c", "d"), 1), (("a", "b"), 1)])
def test_halves_of_two_replicas_make_no_replica_of_kept_processes(
    lost: tuple[str, ...], kept: int
) -> None:
    recovery = {"keepProcesses": "auto", "replacementWaitSeconds": 0}
    job = Transcript(spec({"min": 2, "max": 4}, workers=1, shard=2, recovery=recovery))
    job.started("a", "b", "c", "d", step=3)
    members = job.state.group.members
    for name in lost:
        job.lose(name)
    for name in [name for name in members if name not in lost]:
        job.stopped(name, 3, kept=(members.index(name),))
    job.wait(120)
    launch = job.all(LaunchGroup)[-1]
    assert launch.membership.mesh.replicate == 1 and launch.membership.kept_from == kept


def test_an_error_in_the_first_step_of_kept_processes_is_charged_once_they_are_forked() -> None:
    """A step that cannot be attempted again looks like it, so all are forked once, uncharged."""
    job = Transcript(spec(script=True)).started(step=3)
    charged = []
    for generation in (1, 2, 3):
        if generation == 1:
            kept_after_a_kill(job)
        else:
            job.exits(0, code=1, step=3, error_type="KeyError", error_message="'x'", traceback="t")
            job.all_stopped(3)
            assert job.state.incidents[-1].traceback == "t"
            note = "not charged, since processes had been kept: worker 0"
            assert job.state.incidents[-1].title.startswith(note) == (generation == 2)
        charged.append(dict(job.state.ledger.restarts))
        if job.of(LaunchGroup):
            job.succeed(LaunchGroup)
    infrastructure = {"infrastructure": 1}
    assert charged == [infrastructure, infrastructure, infrastructure | {"user": 1}]
    assert not job.state.group.membership or not job.state.group.membership.kept_from
