"""The agent's machine: fencing, launch, exits, stop, tiers, standbys."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.orchestrator.limits import CONTROLLER_ABSENCE_S
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Restore, ShardLocation, Stack, StagedShard
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.standbys import REFILL_DELAY_S, SPARE_DELAY_S

from .harness import FACTS, SECOND_NS, AgentHarness, of, request_buffers, running


def test_a_launch_forks_every_seat_and_answers_once_all_are_forked() -> None:
    harness = AgentHarness()
    out = harness.launch(1)
    assert [fork.seat.rank for fork in of(commands.Fork, out)] == [0, 1]
    assert [(r.action_id, r.ok) for r in of(m.Launched, out)] == [(11, True)]


def test_the_same_launch_twice_forks_nothing_more() -> None:
    harness = running()
    out = harness.launch(1)
    assert not of(commands.Fork, out)
    assert [r.ok for r in of(m.Launched, out)] == [True]


def test_a_launch_of_an_older_generation_is_refused() -> None:
    harness = running(3)
    out = harness.launch(2)
    assert not of(commands.Fork, out)
    assert [r.ok for r in of(m.Launched, out)] == [False]


def test_a_stopped_generation_cannot_be_launched_again() -> None:
    harness = AgentHarness()
    harness.receive(m.StopWorkers(action_id=1, generation=4))
    assert [r.ok for r in of(m.Launched, harness.launch(4))] == [False]
    assert [r.ok for r in of(m.Launched, harness.launch(5))] == [True]


def test_a_newer_launch_first_kills_the_workers_of_the_older_generation() -> None:
    harness = running()
    out = harness.launch(2)
    assert [(k.generation, k.signal) for k in of(commands.Kill, out)] == [(1, 9), (1, 9)]
    assert not of(commands.Fork, out)
    harness.worker_ends(0, signal=9)
    out = harness.worker_ends(1, signal=9)
    assert [fork.membership.generation for fork in of(commands.Fork, out)] == [2, 2]


def test_a_stop_kills_at_once_and_reports_when_the_last_worker_is_reaped() -> None:
    harness = running()
    died = of(m.WorkerExited, harness.worker_ends(0, signal=11))
    assert [(e.exit.rank, e.exit.signal, e.exit.by_us) for e in died] == [(0, 11, False)]
    out = harness.receive(m.StopWorkers(action_id=7, generation=1))
    assert [(k.rank, k.signal) for k in of(commands.Kill, out)] == [(1, 9)]
    assert not of(m.GroupStopped, out)
    out = harness.worker_ends(1, signal=9)
    assert not of(m.WorkerExited, out)
    (stopped,) = of(m.GroupStopped, out)
    assert stopped.action_id == 7
    assert {(e.rank, e.by_us) for e in stopped.exits} == {(0, False), (1, True)}


def test_a_death_before_the_stop_that_is_reported_after_it_is_not_ours() -> None:
    harness = running()
    harness.receive(m.StopWorkers(action_id=7, generation=1))
    harness.give(inputs.WorkerEnded(1, 0, None, 9, before_ours=True))
    (stopped,) = of(m.GroupStopped, harness.worker_ends(1, signal=9))
    assert {(e.rank, e.by_us) for e in stopped.exits} == {(0, False), (1, True)}


def test_a_repeated_stop_gets_the_same_report() -> None:
    harness = running()
    harness.receive(m.StopWorkers(action_id=7, generation=1))
    harness.worker_ends(0, signal=9)
    harness.worker_ends(1, signal=9)
    (again,) = of(m.GroupStopped, harness.receive(m.StopWorkers(action_id=8, generation=1)))
    assert again.action_id == 8
    assert len(again.exits) == 2


def test_a_stop_with_grace_sends_sigterm_and_then_sigkill() -> None:
    harness = running()
    out = harness.receive(m.StopWorkers(action_id=7, generation=1, grace_s=2.0))
    assert {k.signal for k in of(commands.Kill, out)} == {15}
    harness.worker_ends(0, code=0)
    out = harness.after(2)
    assert [(k.rank, k.signal) for k in of(commands.Kill, out)] == [(1, 9)]
    (stopped,) = of(m.GroupStopped, harness.worker_ends(1, signal=9))
    assert all(e.by_us for e in stopped.exits)


def test_stacks_are_taken_before_the_kill_and_never_block_it_for_long() -> None:
    harness = running()
    out = harness.receive(m.StopWorkers(action_id=7, generation=1, stacks=True))
    assert [(t.ranks, t.by_signal) for t in of(commands.TakeStacks, out)] == [((0, 1), True)]
    assert not of(commands.Kill, out)
    assert {k.signal for k in of(commands.Kill, harness.after(3))} == {9}


def test_an_inspection_reports_what_workers_do_and_leaves_them_alone() -> None:
    harness = running()
    (asked,) = of(commands.TakeStacks, harness.receive(m.Inspect(generation=1)))
    assert (asked.ranks, asked.by_signal) == ((0, 1), False)
    waits = Stack(0, "a collective", True, "S", "peers")
    outside = Stack(1, "x" * 9000, False, "S", "nothing")
    out = harness.give(inputs.StacksTaken(1, (waits, outside), by_signal=False))
    (answer,) = of(m.GroupInspected, out)
    assert [(s.rank, s.activity, len(s.text)) for s in answer.stacks] == [
        (0, "peers", 0), (1, "nothing", 4096),
    ]  # fmt: skip
    assert not of(commands.Kill, out)
    assert not of(commands.TakeStacks, harness.receive(m.Inspect(generation=7)))


def test_a_heartbeat_has_the_activity_of_the_processes_until_the_next_progress() -> None:
    harness = running()
    harness.now_ns += SECOND_NS
    group = harness.machine.group
    assert group is not None and group.quiet_ranks(harness.now_ns) == [0, 1]
    harness.give(inputs.ActivityMeasured({0: 2.5, 1: 0.0}, 0.75))
    due = harness.machine.next_deadline_ns()
    assert due is not None
    harness.now_ns = max(harness.now_ns, due)
    (beat,) = of(m.Heartbeat, harness.give(inputs.ClockTick()))
    assert ([w.idle_s for w in beat.workers], beat.cpu_pressure) == ([2.5, 0.0], 0.75)
    harness.from_worker(0, worker_protocol.ProgressTick())
    assert group.workers[0].idle_s == 0.0
    assert group.quiet_ranks(harness.now_ns) == [1]


def test_a_worker_without_memory_says_so_with_its_exit() -> None:
    harness = running()
    failed = worker_protocol.Failed(
        error_type="MemoryError", message="", traceback="", out_of_memory=True
    )
    (exited,) = of(m.WorkerExited, harness.from_worker(1, failed))
    assert exited.exit.out_of_memory


def test_a_worker_that_the_watchdog_aborted_has_lost_a_peer() -> None:
    harness = running()
    line = "Watchdog caught collective operation timeout"
    crash = worker_protocol.Failed(error_type="", message=line, traceback="", secondary=True)
    out = harness.give(inputs.WorkerEnded(1, 1, None, 6, crash=crash))
    (exited,) = of(m.WorkerExited, out)
    assert exited.exit.secondary and exited.exit.error_message == line


def test_a_python_error_is_reported_with_the_exit() -> None:
    harness = running()
    harness.from_worker(1, worker_protocol.Progress(step=4))
    out = harness.from_worker(
        1, worker_protocol.Failed(error_type="ValueError", message="bad", traceback="Traceback ...")
    )
    (exited,) = of(m.WorkerExited, out)
    assert (exited.exit.error_type, exited.exit.step) == ("ValueError", 4)


def test_a_worker_that_fails_before_its_first_step_names_the_step_it_resumed_after() -> None:
    harness = running(2, restore=Restore(step=12, generation=1, num_shards=2))
    (exited,) = of(m.WorkerExited, harness.worker_ends(0, code=1, generation=2))
    assert exited.exit.step == 12


def test_the_first_step_of_a_generation_is_sent_at_once_and_later_ones_with_the_heartbeat() -> None:
    harness = running()
    assert not of(m.Heartbeat, harness.from_worker(0, worker_protocol.Progress(step=0)))
    (beat,) = of(m.Heartbeat, harness.from_worker(1, worker_protocol.Progress(step=0)))
    assert [w.step for w in beat.workers] == [0, 0]
    assert not of(m.Heartbeat, harness.from_worker(0, worker_protocol.Progress(step=1)))
    deadline = harness.machine.next_deadline_ns()
    assert deadline is not None
    harness.now_ns = deadline
    (beat,) = of(m.Heartbeat, harness.give(inputs.ClockTick()))
    assert [w.step for w in beat.workers] == [1, 0]


def test_after_a_reconnect_the_exits_of_the_running_generation_are_sent_again() -> None:
    harness = running()
    harness.give(inputs.LinkDown())
    assert not of(m.WorkerExited, harness.worker_ends(0, signal=9))
    (hello,) = of(m.Hello, harness.give(inputs.LinkUp(FACTS, 29501)))
    joined = hello.joined
    assert (joined.generation, joined.ranks, joined.offered_port) == (1, (1,), 29501)
    harness.now_ns += 285 * SECOND_NS
    again = of(m.WorkerExited, harness.join())
    assert [(e.exit.rank, e.exit.ago_s) for e in again] == [(0, 285.0)]


def test_a_node_without_a_controller_ends_its_workers_and_itself() -> None:
    harness = running()
    harness.give(inputs.LinkDown())
    assert {k.signal for k in of(commands.Kill, harness.after(CONTROLLER_ABSENCE_S))} == {9}
    harness.worker_ends(0, signal=9)
    assert of(commands.EndNode, harness.worker_ends(1, signal=9))


def absent(harness: AgentHarness, seconds: float | None) -> None:
    """The controller is lost, with this limit of the spec."""
    assert harness.machine.welcome is not None
    welcome = msgspec.structs.replace(harness.machine.welcome, controller_absence_s=seconds)
    harness.receive(welcome)
    harness.give(inputs.LinkDown())


def test_a_node_trains_on_without_a_controller_for_as_long_as_the_spec_allows() -> None:
    harness = running()
    absent(harness, None)
    assert not of(commands.Kill, harness.after(1000 * CONTROLLER_ABSENCE_S))
    assert harness.machine.next_deadline_ns() is None
    other = running()
    absent(other, 5.0)
    assert of(commands.Kill, other.after(5))


def test_a_node_that_gives_up_its_controller_writes_its_last_two_steps_first() -> None:
    harness = running(buffers=True)
    absent(harness, 10.0)
    for step in (0, 1):
        harness.stage(step)
    out = harness.after(10)
    writes = of(commands.WriteStorage, out)
    assert {(w.staged.step, w.staged.shard) for w in writes} == {
        (s, k) for s in (0, 1) for k in (0, 1)
    }
    assert all(w.mesh == Mesh(shard=2) for w in writes), "with what the next controller needs"
    assert not of(commands.Kill, out), "the workers live until the steps are written"
    for write in writes[:-1]:
        done = inputs.WriteDone(write.buffer, write.staged, write.file, checksum="c")
        assert not of(commands.Kill, harness.give(done))
    last = inputs.WriteDone(writes[-1].buffer, writes[-1].staged, writes[-1].file, checksum="c")
    assert of(commands.Kill, harness.give(last))


def test_a_node_whose_storage_does_not_answer_ends_all_the_same() -> None:
    harness = running(buffers=True)
    absent(harness, 10.0)
    harness.stage(0)
    assert of(commands.WriteStorage, harness.after(10))
    due = harness.machine.next_deadline_ns()
    assert due is not None
    harness.now_ns = due
    assert of(commands.Kill, harness.give(inputs.ClockTick()))


def test_with_a_controller_no_note_is_written() -> None:
    harness = running(persist_every_steps=1, buffers=True)
    writes = of(commands.WriteStorage, harness.stage(0))
    assert writes and all(w.mesh is None for w in writes)


def test_the_last_two_complete_steps_are_kept_while_the_next_is_written() -> None:
    harness = running()
    assert len(of(commands.MakeBuffer, request_buffers(harness))) == 6
    for step in range(5):
        harness.stage(step)
    assert harness.staged() == {(1, s, k) for s in (3, 4) for k in (0, 1)}


def test_a_torn_step_never_displaces_the_last_complete_one() -> None:
    harness = running(buffers=True)
    harness.stage(0)
    harness.stage(1)
    free = next(b for b in harness.machine.tiers.buffers.of_slot(0) if b.writable)
    harness.from_worker(0, worker_protocol.Staged(buffer=free.number, step=2, num_bytes=100))
    assert {(1, 1, 0), (1, 1, 1), (1, 0, 0), (1, 0, 1), (1, 2, 0)} <= harness.staged()


def test_buffers_of_the_previous_generation_are_reused_without_loss_of_its_state() -> None:
    harness = running(buffers=True)
    for step in range(3):
        harness.stage(step)
    harness.receive(m.StopWorkers(action_id=7, generation=1))
    harness.worker_ends(0, signal=9)
    harness.worker_ends(1, signal=9)
    harness.launch(2, restore=Restore(step=2, generation=1, num_shards=2))
    out = request_buffers(harness, 2)
    assert not of(commands.MakeBuffer, out)
    assert (
        len([t for t in of(commands.ToRank, out) if isinstance(t.message, worker_protocol.Buffer)])
        == 2
    )
    answer = of(commands.ToRank, harness.from_worker(0, worker_protocol.FetchShard(shard=0), 2))
    assert isinstance(answer[0].message, worker_protocol.Shard)
    harness.stage(3, 2)
    assert harness.staged() == {(g, s, k) for g, s in ((1, 2), (2, 3)) for k in (0, 1)}


def test_steps_after_the_restored_one_are_discarded() -> None:
    harness = running(buffers=True)
    harness.stage(0)
    harness.stage(1)
    harness.receive(m.StopWorkers(action_id=7, generation=1))
    harness.worker_ends(0, signal=9)
    harness.worker_ends(1, signal=9)
    harness.launch(2, restore=Restore(step=0, generation=1, num_shards=2))
    assert harness.staged() == {(1, 0, 0), (1, 0, 1)}


def test_an_upload_keeps_its_buffer_and_training_gets_another_one() -> None:
    harness = running(persist_every_steps=2, buffers=True)
    harness.stage(0)
    writes = of(commands.WriteStorage, harness.stage(1))
    assert [w.directory for w in writes] == ["step-00000001.gen-1"] * 2
    for step in range(2, 7):
        failed = of(m.PersistFailed, harness.stage(step))
        assert len(failed) == (2 if step % 2 else 0)  # skipped: the first upload still runs
        assert all(harness.machine.tiers.buffers.buffers[w.buffer].pins for w in writes)
        assert {(1, step, 0), (1, step, 1)} <= harness.staged()
    done = inputs.WriteDone(writes[0].buffer, writes[0].staged, writes[0].file, "ab", 0.1)
    (persisted,) = of(m.ShardPersisted, harness.give(done))
    assert (persisted.shard.step, persisted.shard.checksum) == (1, "ab")


def test_a_persist_request_writes_the_same_step_on_every_node() -> None:
    harness = running(buffers=True)
    harness.stage(0)
    assert not of(
        commands.WriteStorage, harness.receive(m.Persist(action_id=3, generation=1, step=1))
    )
    assert [w.staged.step for w in of(commands.WriteStorage, harness.stage(1))] == [1, 1]
    harness.stage(2)
    # A late request: step 1 is still in memory, so step 1 is written, not the newest.
    harness.receive(m.Persist(action_id=4, generation=1, step=1))
    assert not of(commands.WriteStorage, harness.stage(3))


def test_the_last_step_is_persisted_when_the_training_loop_ends() -> None:
    harness = running(persist_every_steps=100, buffers=True)
    harness.stage(7)
    writes = of(commands.WriteStorage, harness.from_worker(0, worker_protocol.Finished(step=7)))
    assert [(w.staged.step, w.staged.shard) for w in writes] == [(7, 0)]


def test_a_shard_that_is_not_here_is_fetched_from_a_peer_that_has_it() -> None:
    harness = AgentHarness()
    source = ShardLocation(1, "node-1", "127.0.0.1", 9)
    harness.launch(2, restore=Restore(step=5, generation=1, num_shards=2, sources=(source,)))
    (fetch,) = of(
        commands.FetchFromPeer, harness.from_worker(0, worker_protocol.FetchShard(shard=1), 2)
    )
    assert fetch.sources == (source,)
    (answer,) = of(commands.ToRank, harness.from_worker(0, worker_protocol.FetchShard(shard=0), 2))
    assert isinstance(answer.message, worker_protocol.NoShard)


def test_buddy_copies_keep_two_versions_and_refuse_an_older_generation() -> None:
    harness = running(2)
    for step in range(4):
        buffer, _ = harness.machine.accept_copy(StagedShard(step, 2, 5, 8, 100))
        assert isinstance(buffer, int)
        harness.give(inputs.CopyDone(buffer, ok=True))
    assert harness.staged() == {(2, 2, 5), (2, 3, 5)}
    refused, _ = harness.machine.accept_copy(StagedShard(9, 1, 5, 8, 100))
    assert refused == "generation 1 is over; 2 runs here"


def test_the_end_of_a_push_of_an_earlier_generation_is_not_taken_for_a_newer_one() -> None:
    """Seed 4002817: the controller confirmed a step of which no buddy had a copy yet."""
    harness, buddy = AgentHarness(), {"buddy": "node-1"}
    harness.launch(1, **buddy)
    request_buffers(harness)
    slow = of(commands.PushToBuddy, harness.stage(0))
    assert len(slow) == 2
    harness.receive(m.StopWorkers(action_id=20, generation=1, grace_s=0.0))
    for rank in range(2):
        harness.worker_ends(rank, signal=9)
    harness.launch(2, **buddy)
    request_buffers(harness, 2)
    newer = of(commands.PushToBuddy, harness.stage(0, 2))
    assert [push.staged.generation for push in newer] == [2, 2]
    for push in slow:
        assert not of(m.StepCopied, harness.give(inputs.PushDone(push.buffer, "", 9.0)))
    (report,) = [
        report
        for push in newer
        for report in of(m.StepCopied, harness.give(inputs.PushDone(push.buffer, "", 1.0)))
    ]
    assert (report.generation, report.step, report.seconds) == (2, 0, 1.0)


def test_a_push_carries_the_confirmed_step_to_the_buddy() -> None:
    """Seed 5002521: the order that confirmed step 1 was lost, and step 2 replaced its copy."""
    harness = running(buddy="node-1")
    harness.receive(m.CopyStep(generation=1, step=1, confirmed=0))
    for step in range(3):
        buffer, _ = harness.machine.accept_copy(StagedShard(step, 1, 5, 8, 100), step - 1)
        assert isinstance(buffer, int)
        harness.give(inputs.CopyDone(buffer, ok=True))
    assert harness.staged() == {(1, 1, 5), (1, 2, 5)}


def test_messages_of_a_worker_of_another_generation_change_nothing() -> None:
    harness = running(2)
    assert not harness.from_worker(0, worker_protocol.Finished(step=3), generation=1)
    assert not harness.worker_ends(0, signal=9, generation=1)
    assert harness.machine.group is not None
    assert len(harness.machine.group.alive) == 2


# -- standbys ---------------------------------------------------------------------------------
def refills(harness: AgentHarness, until_s: float) -> list[tuple[float, int]]:
    """(second, count) of the requested standbys, with a tick at each deadline of the machine."""
    found = []
    while (due := harness.machine.next_deadline_ns()) is not None and due <= until_s * SECOND_NS:
        harness.now_ns = due
        out = harness.give(inputs.ClockTick())
        found += [(due / SECOND_NS, o.count) for o in of(commands.RefillStandbys, out)]
    return found


def test_a_node_without_ranks_forks_standbys_after_the_start_of_the_others() -> None:
    assert refills(AgentHarness(), until_s=30) == [(SPARE_DELAY_S, 2)]


def test_a_node_with_ranks_forks_standbys_after_its_first_step_and_not_before() -> None:
    harness = running()
    assert refills(harness, until_s=10) == []
    for rank in range(2):
        harness.from_worker(rank, worker_protocol.Progress(step=0, step_s=0.1))
    assert refills(harness, until_s=30) == [(10 + REFILL_DELAY_S, 2)]


def reports(out: Iterable[object]) -> list[bool]:
    return [report.ready for report in of(m.StandbysReported, out)]


def test_the_controller_is_notified_when_standbys_have_imported_what_the_script_imports() -> None:
    harness = AgentHarness(joined=False)
    harness.give(inputs.LinkUp(FACTS, 29500))
    harness.join()
    assert reports(harness.give(inputs.JobConfigured(must_import=True))) == [False]
    assert refills(harness, until_s=10) == [(SPARE_DELAY_S, 2)]
    assert reports(harness.give(inputs.StandbysReady())) == [True]
    assert reports(harness.give(inputs.StandbysReady())) == [], "it is known"


def test_standbys_without_anything_to_import_are_ready_at_once() -> None:
    harness = AgentHarness()
    assert reports(harness.give(inputs.JobConfigured(must_import=False))) == [True]
    harness.launch()
    nothing = worker_protocol.ImportsReported(modules=())
    assert reports(harness.from_worker(0, nothing)) == []


def test_standbys_for_the_next_launch_are_ready_after_their_fork_only() -> None:
    harness = AgentHarness()
    harness.give(inputs.JobConfigured(must_import=False))
    harness.launch()
    learned = worker_protocol.ImportsReported(modules=("transformers",))
    assert reports(harness.from_worker(0, learned)) == [False]
    assert reports(harness.give(inputs.StandbysReady())) == [], "those that are to come are not"
    assert refills(harness, until_s=10) == [(REFILL_DELAY_S, 2)]
    assert reports(harness.give(inputs.StandbysReady())) == [True]


def test_each_controller_is_notified() -> None:
    harness = AgentHarness()
    harness.give(inputs.JobConfigured(must_import=True))
    assert refills(harness, until_s=10)
    harness.give(inputs.LinkDown())
    assert reports(harness.give(inputs.StandbysReady())) == [], "there is no controller"
    assert reports(harness.join()) == [True]
    harness.give(inputs.LinkDown())
    assert reports(harness.join()) == [True]


def test_the_controller_receives_what_rank_0_imported_for_nodes_that_join() -> None:
    harness = running()
    learned = worker_protocol.ImportsReported(modules=("transformers", "peft"))
    sent = m.ImportsLearned(modules=("transformers", "peft"))
    assert of(m.ImportsLearned, harness.from_worker(1, learned)) == [], "of one rank in the job"
    assert of(m.ImportsLearned, harness.from_worker(0, learned)) == [sent]
    assert of(m.ImportsLearned, harness.from_worker(0, learned)) == [], "it is known"
    harness.give(inputs.LinkDown())
    assert of(m.ImportsLearned, harness.join()) == [sent], "a new controller does not know it"
