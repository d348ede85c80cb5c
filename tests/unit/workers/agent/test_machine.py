"""The agent's machine, driven by hand: fencing, launch, exits, stop, tiers."""

from __future__ import annotations

from holdfast.orchestrator.limits import CONTROLLER_ABSENCE_S
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Restore, ShardLocation, StagedShard
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.machine import MachineTiming

from .harness import FACTS, NS, AgentHarness, of, request_buffers


def test_a_launch_forks_every_seat_and_answers_once_all_are_forked() -> None:
    bench = AgentHarness()
    out = bench.launch(1)
    assert [fork.seat.rank for fork in of(commands.Fork, out)] == [0, 1]
    assert [(r.action_id, r.ok) for r in of(m.Launched, out)] == [(11, True)]


def test_the_same_launch_twice_forks_nothing_more() -> None:
    bench = AgentHarness()
    bench.launch(1)
    out = bench.launch(1)
    assert not of(commands.Fork, out)
    assert [r.ok for r in of(m.Launched, out)] == [True]


def test_a_launch_of_an_older_generation_is_refused() -> None:
    bench = AgentHarness()
    bench.launch(3)
    out = bench.launch(2)
    assert not of(commands.Fork, out)
    assert [r.ok for r in of(m.Launched, out)] == [False]


def test_a_stopped_generation_cannot_be_launched_again() -> None:
    bench = AgentHarness()
    bench.tell(m.StopWorkers(action_id=1, generation=4))
    assert [r.ok for r in of(m.Launched, bench.launch(4))] == [False]
    assert [r.ok for r in of(m.Launched, bench.launch(5))] == [True]


def test_a_newer_launch_first_kills_the_zombies_of_the_older_one() -> None:
    bench = AgentHarness()
    bench.launch(1)
    out = bench.launch(2)
    assert [(k.generation, k.signal) for k in of(commands.Kill, out)] == [(1, 9), (1, 9)]
    assert not of(commands.Fork, out)
    bench.ends(0, signal=9)
    out = bench.ends(1, signal=9)
    assert [fork.membership.generation for fork in of(commands.Fork, out)] == [2, 2]


def test_a_stop_kills_at_once_and_reports_when_the_last_worker_is_reaped() -> None:
    bench = AgentHarness()
    bench.launch(1)
    died = of(m.WorkerExitReport, bench.ends(0, signal=11))
    assert [(e.exit.rank, e.exit.signal, e.exit.by_us) for e in died] == [(0, 11, False)]
    out = bench.tell(m.StopWorkers(action_id=7, generation=1))
    assert [(k.rank, k.signal) for k in of(commands.Kill, out)] == [(1, 9)]
    assert not of(m.Stopped, out)
    out = bench.ends(1, signal=9)
    assert not of(m.WorkerExitReport, out)
    (stopped,) = of(m.Stopped, out)
    assert stopped.action_id == 7
    assert {(e.rank, e.by_us) for e in stopped.exits} == {(0, False), (1, True)}


def test_a_repeated_stop_gets_the_same_report() -> None:
    bench = AgentHarness()
    bench.launch(1)
    bench.tell(m.StopWorkers(action_id=7, generation=1))
    bench.ends(0, signal=9)
    bench.ends(1, signal=9)
    (again,) = of(m.Stopped, bench.tell(m.StopWorkers(action_id=8, generation=1)))
    assert again.action_id == 8
    assert len(again.exits) == 2


def test_a_stop_with_grace_sends_sigterm_and_then_sigkill() -> None:
    bench = AgentHarness()
    bench.launch(1)
    out = bench.tell(m.StopWorkers(action_id=7, generation=1, grace_s=2.0))
    assert {k.signal for k in of(commands.Kill, out)} == {15}
    bench.ends(0, code=0)
    bench.now_ns += 2 * NS
    out = bench.give(inputs.ClockTick())
    assert [(k.rank, k.signal) for k in of(commands.Kill, out)] == [(1, 9)]
    (stopped,) = of(m.Stopped, bench.ends(1, signal=9))
    assert all(e.by_us for e in stopped.exits)


def test_stacks_are_taken_before_the_kill_and_never_block_it_for_long() -> None:
    bench = AgentHarness()
    bench.launch(1)
    out = bench.tell(m.StopWorkers(action_id=7, generation=1, stacks=True))
    assert [t.ranks for t in of(commands.TakeStacks, out)] == [(0, 1)]
    assert not of(commands.Kill, out)
    bench.now_ns += 3 * NS
    assert {k.signal for k in of(commands.Kill, bench.give(inputs.ClockTick()))} == {9}


def test_a_python_error_is_reported_with_the_exit() -> None:
    bench = AgentHarness()
    bench.launch(1)
    bench.says(1, worker_protocol.Progress(step=4))
    bench.says(
        1, worker_protocol.Failed(error_type="ValueError", message="bad", traceback="Traceback ...")
    )
    (exited,) = of(m.WorkerExitReport, bench.ends(1, code=1))
    assert (exited.exit.error_type, exited.exit.step) == ("ValueError", 4)


def test_a_worker_that_fails_before_its_first_step_names_the_step_it_resumed_after() -> None:
    bench = AgentHarness()
    bench.launch(2, restore=Restore(step=12, generation=1, num_shards=2))
    (exited,) = of(m.WorkerExitReport, bench.ends(0, code=1, generation=2))
    assert exited.exit.step == 12


def test_the_first_step_of_a_generation_is_told_at_once_and_later_ones_with_the_beat() -> None:
    bench = AgentHarness()
    bench.launch(1)
    assert not of(m.Heartbeat, bench.says(0, worker_protocol.Progress(step=0)))
    (beat,) = of(m.Heartbeat, bench.says(1, worker_protocol.Progress(step=0)))
    assert [w.step for w in beat.workers] == [0, 0]
    assert not of(m.Heartbeat, bench.says(0, worker_protocol.Progress(step=1)))
    deadline = bench.machine.next_deadline_ns()
    assert deadline is not None
    bench.now_ns = deadline
    (beat,) = of(m.Heartbeat, bench.give(inputs.ClockTick()))
    assert [w.step for w in beat.workers] == [1, 0]


def test_after_a_reconnect_the_exits_of_the_running_generation_are_told_again() -> None:
    bench = AgentHarness()
    bench.launch(1)
    bench.give(inputs.LinkDown())
    assert not of(m.WorkerExitReport, bench.ends(0, signal=9))
    (hello,) = of(m.Hello, bench.give(inputs.LinkUp(FACTS, 29501)))
    assert (hello.generation, hello.ranks, hello.offered_port) == (1, (1,), 29501)
    assert [e.exit.rank for e in of(m.WorkerExitReport, bench.join())] == [0]


def test_a_node_without_a_controller_ends_its_workers_and_itself() -> None:
    bench = AgentHarness()
    bench.launch(1)
    bench.give(inputs.LinkDown())
    bench.now_ns += int(CONTROLLER_ABSENCE_S * NS)
    assert {k.signal for k in of(commands.Kill, bench.give(inputs.ClockTick()))} == {9}
    bench.ends(0, signal=9)
    assert of(commands.EndNode, bench.ends(1, signal=9))


def test_the_last_two_complete_steps_are_kept_while_the_next_is_written() -> None:
    bench = AgentHarness()
    bench.launch(1)
    assert len(of(commands.MakeBuffer, request_buffers(bench))) == 6
    for step in range(5):
        bench.stage(step)
    assert bench.staged() == {(1, s, k) for s in (3, 4) for k in (0, 1)}


def test_a_torn_step_never_displaces_the_last_complete_one() -> None:
    bench = AgentHarness()
    bench.launch(1)
    request_buffers(bench)
    bench.stage(0)
    bench.stage(1)
    free = next(b for b in bench.machine.tiers.buffers.of_slot(0) if b.writable)
    bench.says(0, worker_protocol.Staged(buffer=free.number, step=2, num_bytes=100))
    assert {(1, 1, 0), (1, 1, 1), (1, 0, 0), (1, 0, 1), (1, 2, 0)} <= bench.staged()


def test_buffers_of_the_previous_generation_are_used_again_without_losing_its_state() -> None:
    bench = AgentHarness()
    bench.launch(1)
    request_buffers(bench)
    for step in range(3):
        bench.stage(step)
    bench.tell(m.StopWorkers(action_id=7, generation=1))
    bench.ends(0, signal=9)
    bench.ends(1, signal=9)
    bench.launch(2, restore=Restore(step=2, generation=1, num_shards=2))
    out = request_buffers(bench, 2)
    assert not of(commands.MakeBuffer, out)
    assert (
        len([t for t in of(commands.ToRank, out) if isinstance(t.message, worker_protocol.Buffer)])
        == 2
    )
    answer = of(commands.ToRank, bench.says(0, worker_protocol.FetchShard(shard=0), 2))
    assert isinstance(answer[0].message, worker_protocol.Shard)
    bench.stage(3, 2)
    assert bench.staged() == {(g, s, k) for g, s in ((1, 2), (2, 3)) for k in (0, 1)}


def test_steps_beyond_the_restored_one_are_abandoned() -> None:
    bench = AgentHarness()
    bench.launch(1)
    request_buffers(bench)
    bench.stage(0)
    bench.stage(1)
    bench.tell(m.StopWorkers(action_id=7, generation=1))
    bench.ends(0, signal=9)
    bench.ends(1, signal=9)
    bench.launch(2, restore=Restore(step=0, generation=1, num_shards=2))
    assert bench.staged() == {(1, 0, 0), (1, 0, 1)}


def test_an_upload_keeps_its_buffer_and_training_gets_another_one() -> None:
    bench = AgentHarness()
    bench.launch(1, persist_every_steps=2)
    request_buffers(bench)
    bench.stage(0)
    writes = of(commands.WriteStorage, bench.stage(1))
    assert [w.directory for w in writes] == ["step-00000001.gen-1"] * 2
    for step in range(2, 7):
        failed = of(m.ShardPersistFailed, bench.stage(step))
        assert len(failed) == (2 if step % 2 else 0)  # passed over: the first still runs
        assert all(bench.machine.tiers.buffers.buffers[w.buffer].pins for w in writes)
        assert {(1, step, 0), (1, step, 1)} <= bench.staged()
    done = inputs.WriteDone(writes[0].buffer, writes[0].staged, writes[0].file, "ab", 0.1)
    (persisted,) = of(m.Persisted, bench.give(done))
    assert (persisted.shard.step, persisted.shard.checksum) == (1, "ab")


def test_a_persist_order_writes_the_same_step_on_every_node() -> None:
    bench = AgentHarness()
    bench.launch(1)
    request_buffers(bench)
    bench.stage(0)
    assert not of(commands.WriteStorage, bench.tell(m.Persist(action_id=3, generation=1, step=1)))
    assert [w.staged.step for w in of(commands.WriteStorage, bench.stage(1))] == [1, 1]
    bench.stage(2)
    # Ordered late: step 1 is still here, so it is step 1, not the newest.
    bench.tell(m.Persist(action_id=4, generation=1, step=1))
    assert not of(commands.WriteStorage, bench.stage(3))


def test_the_last_step_is_persisted_when_the_loop_is_through() -> None:
    bench = AgentHarness()
    bench.launch(1, persist_every_steps=100)
    request_buffers(bench)
    bench.stage(7)
    writes = of(commands.WriteStorage, bench.says(0, worker_protocol.Finished(step=7)))
    assert [(w.staged.step, w.staged.shard) for w in writes] == [(7, 0)]


def test_a_shard_that_is_not_here_is_fetched_from_a_peer_that_has_it() -> None:
    bench = AgentHarness()
    source = ShardLocation(1, "node-1", "127.0.0.1", 9)
    bench.launch(2, restore=Restore(step=5, generation=1, num_shards=2, sources=(source,)))
    (fetch,) = of(commands.FetchFromPeer, bench.says(0, worker_protocol.FetchShard(shard=1), 2))
    assert fetch.sources == (source,)
    (answer,) = of(commands.ToRank, bench.says(0, worker_protocol.FetchShard(shard=0), 2))
    assert isinstance(answer.message, worker_protocol.NoShard)


def test_buddy_copies_keep_two_versions_and_refuse_a_zombie() -> None:
    bench = AgentHarness()
    bench.launch(2)
    for step in range(4):
        buffer, _ = bench.machine.accept_copy(StagedShard(step, 2, 5, 8, 100))
        assert isinstance(buffer, int)
        bench.give(inputs.CopyDone(buffer, ok=True))
    assert bench.staged() == {(2, 2, 5), (2, 3, 5)}
    refused, _ = bench.machine.accept_copy(StagedShard(9, 1, 5, 8, 100))
    assert refused == "generation 1 is over; 2 runs here"


def test_messages_of_a_worker_of_another_generation_change_nothing() -> None:
    bench = AgentHarness()
    bench.launch(2)
    assert not bench.says(0, worker_protocol.Finished(step=3), generation=1)
    assert not bench.ends(0, signal=9, generation=1)
    assert bench.machine.group is not None
    assert len(bench.machine.group.alive) == 2


# -- standbys ---------------------------------------------------------------------------------
def refills(bench: AgentHarness, until_s: float) -> list[tuple[float, int]]:
    """(second, how many) of the standbys asked for, waking the machine when it wants to be."""
    found = []
    while (due := bench.machine.next_deadline_ns()) is not None and due <= until_s * NS:
        bench.now_ns = due
        out = bench.give(inputs.ClockTick())
        found += [(due / NS, o.count) for o in of(commands.RefillStandbys, out)]
    return found


def test_a_node_without_seats_forks_standbys_once_the_others_have_had_time_to_start() -> None:
    assert refills(AgentHarness(), until_s=30) == [(MachineTiming().spare_delay_s, 2)]


def test_a_node_with_seats_forks_standbys_after_its_first_step_and_not_before() -> None:
    bench = AgentHarness()
    bench.launch()
    assert refills(bench, until_s=10) == []
    for rank in range(2):
        bench.says(rank, worker_protocol.Progress(step=0, step_s=0.1))
    assert refills(bench, until_s=30) == [(10 + MachineTiming().refill_delay_s, 2)]
