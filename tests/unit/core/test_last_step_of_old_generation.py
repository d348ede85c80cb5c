"""Found by seeds 44, 73 and 258: a job finished and its last step never reached storage.

A node is lost just after the last step. The next generation resumes from memory after that very
step, has nothing left to do and ends with exit code 0. The state to keep was staged by the
generation before: its agents refused the order to write it, or had written it already and been
refused themselves, and the job waited ten minutes and then ended without its result.
"""

from __future__ import annotations

from holdfast.orchestrator.core.actions import CommitManifest, FinishJob, LaunchGroup, PersistStep
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Restore
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import inputs as f
from tests.unit.core.harness import Transcript
from tests.unit.workers.agent.test_machine import AgentHarness, of


def _buffers(bench: AgentHarness) -> None:
    for rank in range(2):
        for _ in range(3):
            bench.says(rank, worker_protocol.BufferRequest(num_bytes=100))


def test_the_controller_orders_and_commits_what_the_old_generation_staged() -> None:
    story = Transcript().started(step=40)
    story.exits(0, signal=9, step=49)
    kept = {node: story.inventory(node, 49) for node in ("a", "b")}
    story.all_stopped(49)
    assert story.of(LaunchGroup)[0].membership.generation == 2
    story.succeed(LaunchGroup)
    for rank in range(4):
        story.exits(rank, code=0, step=49)
    story.stopped("a", staged=kept["a"])
    story.stopped("b", staged=kept["b"])
    order = story.one(PersistStep)
    assert (order.step, order.generation) == (49, 1)
    for shard in range(2):
        story.persisted(49, shard, generation=1)
    assert story.one(CommitManifest).generation == 1
    story.succeed(CommitManifest)
    assert story.one(FinishJob).outcome == "succeeded"


def test_an_agent_writes_what_an_older_generation_left_in_its_memory() -> None:
    bench = AgentHarness()
    bench.launch(1)
    _buffers(bench)
    bench.stage(49)
    bench.tell(m.StopWorkers(action_id=1, generation=1))
    for rank in range(2):
        bench.ends(rank, signal=9)
    bench.launch(2, restore=Restore(step=49, generation=1, num_shards=2))
    for rank in range(2):
        bench.says(rank, worker_protocol.Finished(step=49), generation=2)
        bench.ends(rank, code=0, generation=2)
    bench.tell(m.StopWorkers(action_id=2, generation=2))
    writes = of(f.WriteStorage, bench.tell(m.Persist(action_id=3, generation=1, step=49)))
    assert sorted(write.staged.shard for write in writes) == [0, 1]
    assert {write.directory for write in writes} == {"step-00000049.gen-1"}


def test_an_agent_that_had_written_it_before_the_order_says_so_again() -> None:
    bench = AgentHarness()
    bench.launch(1)
    _buffers(bench)
    bench.stage(49)
    written = of(f.WriteStorage, bench.says(0, worker_protocol.Finished(step=49)))[0]
    done = f.WriteDone(written.buffer, written.staged, written.file, checksum="c")
    (told,) = of(m.Persisted, bench.give(done))
    bench.tell(m.StopWorkers(action_id=1, generation=1))
    for rank in range(2):
        bench.ends(rank, signal=9)
    again = of(m.Persisted, bench.tell(m.Persist(action_id=2, generation=1, step=49)))
    assert told in again


def test_an_agent_that_holds_no_such_step_says_that() -> None:
    bench = AgentHarness()
    bench.launch(1)
    bench.tell(m.StopWorkers(action_id=1, generation=1))
    for rank in range(2):
        bench.ends(rank, signal=9)
    (failed,) = of(m.ShardPersistFailed, bench.tell(m.Persist(action_id=2, generation=1, step=49)))
    assert "not held here" in failed.detail
