"""Bugs that seeds of the simulation found, as transcripts."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from holdfast.orchestrator.core.events import (
    ActionSucceeded,
    ControllerStarted,
    ResumeRequested,
    SuspendRequested,
)
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Restore
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from tests.unit.workers.agent.machine.harness import AgentHarness, of, request_buffers

from .harness import Transcript, spec


# -- Seeds 101, 212, 283, 903 and 1656: a new controller ---------------------------------------
def test_a_launch_is_not_repeated_for_a_generation_that_is_being_stopped() -> None:
    """Seed 212: stop and launch were both unanswered when the controller died; after a timeout the
    next one launched the old generation again, beside the new one."""
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    job.exits(0, signal=9)
    assert len(job.of(StopGroup)) == 2
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2))
    job.wait(60)
    launched = [a for a in job.actions if isinstance(a, LaunchGroup)]
    assert [launch.generation for launch in launched] == [1, 1]


def test_a_promised_node_that_died_before_it_joined_is_released() -> None:
    """Seed 101: such nodes used up the capacity of the backend, and the job waited without end."""
    job = Transcript(spec({"min": 2, "max": 2}))
    job.submit()
    request = job.one(RequestNodes)
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("x", "y")))
    job.wait(301)
    assert sorted(action.node for action in job.of(ReleaseNode)) == ["x", "y"]
    assert job.one(RequestNodes).count == 2


def test_a_request_whose_result_was_lost_is_settled_by_the_nodes_of_the_backend() -> None:
    job = Transcript(spec({"min": 2, "max": 2}))
    job.submit()
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("x",)))
    assert job.one(RequestNodes).count == 1, "x is pending, one more is missing"


# -- Seeds 44, 73 and 258: the last step never reached storage ----------------------------------
# A node is lost just after the last step. The next generation restores that very step from memory,
# has nothing left to do and ends with exit code 0. The state was staged by the generation before:
# its agents refused to write it, or had written it and their shards were refused, and the job
# waited ten minutes and ended without its result.
def _stop(agent: AgentHarness) -> None:
    agent.receive(m.StopWorkers(action_id=1, generation=1))
    for rank in range(2):
        agent.worker_ends(rank, signal=9)


def test_the_controller_has_a_state_of_the_old_generation_written_and_commits_it() -> None:
    job = Transcript().started(step=40)
    job.exits(0, signal=9, step=49)
    kept = {node: job.inventory(node, 49) for node in ("a", "b")}
    job.all_stopped(49)
    assert job.of(LaunchGroup)[0].membership.generation == 2
    job.succeed(LaunchGroup)
    for rank in range(4):
        job.exits(rank, code=0, step=49)
    job.stopped("a", staged=kept["a"])
    job.stopped("b", staged=kept["b"])
    order = job.one(PersistStep)
    assert (order.step, order.generation) == (49, 1)
    for shard in range(2):
        job.persisted(49, shard, generation=1)
    assert job.one(CommitManifest).generation == 1
    job.succeed(CommitManifest)
    assert job.one(FinishJob).outcome == "succeeded"


def test_an_agent_writes_a_state_that_an_older_generation_staged() -> None:
    agent = AgentHarness()
    agent.launch(1)
    request_buffers(agent)
    agent.stage(49)
    _stop(agent)
    agent.launch(2, restore=Restore(step=49, generation=1, num_shards=2))
    for rank in range(2):
        agent.from_worker(rank, worker_protocol.Finished(step=49), generation=2)
        agent.worker_ends(rank, code=0, generation=2)
    agent.receive(m.StopWorkers(action_id=2, generation=2))
    writes = of(commands.WriteStorage, agent.receive(m.Persist(action_id=3, generation=1, step=49)))
    assert sorted(write.staged.shard for write in writes) == [0, 1]
    assert {write.directory for write in writes} == {"step-00000049.gen-1"}


def test_an_agent_that_had_written_the_state_reports_it_again() -> None:
    agent = AgentHarness()
    agent.launch(1)
    request_buffers(agent)
    agent.stage(49)
    written = of(commands.WriteStorage, agent.from_worker(0, worker_protocol.Finished(step=49)))[0]
    done = inputs.WriteDone(written.buffer, written.staged, written.file, checksum="c")
    (first,) = of(m.ShardPersisted, agent.give(done))
    _stop(agent)
    again = of(m.ShardPersisted, agent.receive(m.Persist(action_id=2, generation=1, step=49)))
    assert first in again


def test_an_agent_without_the_step_reports_a_failure() -> None:
    agent = AgentHarness()
    agent.launch(1)
    _stop(agent)
    (failed,) = of(m.PersistFailed, agent.receive(m.Persist(action_id=2, generation=1, step=49)))
    assert "not held here" in failed.detail


# -- Seed 1000654: a suspend during the recovery from an error that would end the job ------------
# The same error at the same step for the second time ends a job. If the user requests a suspend (or
# cancel) before all nodes have stopped, that request wins: the job is suspended, no restart is
# charged, and a resume tries once more. The simulation counted a restart that never happened, and
# the job kept the traceback of an error that had not ended it.
def _fails(transcript: Transcript) -> None:
    transcript.exits(
        1, code=1, step=41, error_type="ValueError", error_message="bad", traceback="Traceback: bad"
    )


def _suspended_with_the_second_error() -> Transcript:
    transcript = Transcript().started(step=41)
    _fails(transcript)
    transcript.all_stopped(41)
    transcript.succeed(LaunchGroup)
    _fails(transcript)
    transcript.apply(SuspendRequested(by="user"))
    assert transcript.state.phase == "recovering"
    transcript.all_stopped()
    return transcript


def test_a_suspend_during_recovery_wins_over_the_error_that_would_end_the_job() -> None:
    transcript = _suspended_with_the_second_error()
    state = transcript.state
    assert state.phase == "suspended" and not transcript.of(FinishJob)
    assert [one.failure_class for one in state.incidents] == ["user", "user"]
    assert state.ledger.restarts == {"user": 1}, "no restart follows the second error"
    assert state.incidents[-1].traceback == "Traceback: bad"
    assert state.traceback == "", "no error has ended the job"


def test_after_a_resume_the_error_ends_the_job() -> None:
    transcript = _suspended_with_the_second_error()
    transcript.apply(ResumeRequested(by="user"))
    transcript.join("c", "d")
    transcript.succeed(LaunchGroup)
    _fails(transcript)
    transcript.all_stopped()
    assert transcript.state.phase == "failed"
    assert "twice" in transcript.state.reason.text
    assert transcript.state.ledger.restarts == {"user": 1}
    assert transcript.state.traceback == "Traceback: bad"


# -- Seed 4000006: a suspend while nodes gather --------------------------------------------------
def test_a_suspend_ends_the_wait_for_more_nodes() -> None:
    """The timer of that wait ran on while the job wrote its last step."""
    job = Transcript(spec({"min": 2, "max": 3})).started("a", "b", "c", step=5)
    job.lose("a")
    job.lose("b")
    job.stopped("c", 5)
    job.fail(job.last(RequestNodes))
    job.wait(3.0)
    assert job.state.phase == "pending"
    job.join("d")
    assert "gather" in job.state.timers
    job.apply(SuspendRequested())
    assert job.state.phase == "suspending"
    assert "gather" not in job.state.timers
