"""Ranks of a node with one shard index share the buffers of a slot."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands
from holdfast.workers.agent.machine.buffer_states import Ask
from holdfast.workers.agent.machine.commands import Command
from holdfast.workers.agent.machine.staging_buffers import Differ, Give, StagingBuffers
from tests.unit.workers.members import membership

from .harness import AgentHarness, of

TWINS = (0, 1, 2)
BYTES = 100


class TwinRun:
    """Three twins, none more than a step ahead; each may skip a step that the others stage."""

    def __init__(self) -> None:
        self.buffers = StagingBuffers(itertools.count(1))
        self.granted: dict[int, Give] = {}
        """Local rank -> the buffer that it writes."""
        self.asked: set[int] = set()
        self.step = dict.fromkeys(TWINS, -1)
        self.staged: dict[int, set[int]] = {}
        """Step -> twins that have staged it."""
        self.pins: list[int] = []
        self.differ = False
        self.take(self.buffers.launch(1, [TWINS], None))

    def take(self, changes: list) -> None:  # type: ignore[type-arg]
        for change in changes:
            match change:
                case Give() if change.parts == 0:
                    pass
                case Give():
                    assert change.slot in self.asked
                    self.asked.discard(change.slot)
                    self.granted[change.slot] = change
                    self.expect_alone(change)
                case commands.FreeBuffer():
                    assert all(grant.buffer != change.buffer for grant in self.granted.values())

    def expect_alone(self, own: Give) -> None:
        """No other twin writes these bytes, and none reads them."""
        buffer = self.buffers.buffers[own.buffer]
        assert buffer.content is None and not buffer.pins
        others = [grant for grant in self.granted.values() if grant is not own]
        for other in (grant for grant in others if grant.buffer == own.buffer):
            assert own.parts == other.parts == len(TWINS) and own.part != other.part
            assert self.step[other.slot] == self.step[own.slot]

    def ask(self, rank: int, layout: int = 1, skip: bool = False) -> None:
        if rank in self.granted or rank in self.asked or self.step[rank] > min(self.step.values()):
            return
        self.step[rank] += 1
        if not skip:
            self.asked.add(rank)
            self.take(self.buffers.request(rank, BYTES, Ask(self.step[rank], layout, BYTES)))

    def write(self, rank: int) -> None:
        grant = self.granted.pop(rank, None)
        if grant is None:
            return
        step = self.step[rank]
        self.staged.setdefault(step, set()).add(rank)
        content = StagedShard(step, 1, 0, 1, BYTES)
        complete = self.buffers.staged(rank, grant.buffer, content)
        assert not complete or grant.parts == 1 or self.staged[step] == set(TWINS)
        self.take(self.buffers.settle())

    def whole(self) -> list[int]:
        return sorted(step for step, ranks in self.staged.items() if ranks == set(TWINS))

    def all_stage(self) -> None:
        for rank in TWINS:
            self.ask(rank)
        for rank in TWINS:
            assert rank in self.granted
            self.write(rank)


def test_all_twins_write_one_buffer_and_the_node_has_the_shard_when_all_have() -> None:
    run = TwinRun()
    for rank in TWINS:
        run.ask(rank)
    assert {grant.buffer for grant in run.granted.values()} == {1}
    assert [run.granted[rank].part for rank in TWINS] == [0, 1, 2]
    run.write(2)
    run.write(0)
    assert run.buffers.inventory() == () and run.buffers.complete() == []
    run.write(1)
    assert [shard.step for shard in run.buffers.inventory()] == [0]
    assert run.buffers.complete() == [(1, 0)]


def test_a_slot_of_twins_has_as_many_buffers_as_one_worker() -> None:
    run = TwinRun()
    for step in range(20):
        run.all_stage()
        assert [shard.step for shard in run.buffers.inventory()] == [step - 1, step][-step - 1 :]
    assert len(run.buffers.buffers) == 3


def test_a_step_that_one_twin_skips_is_not_held_and_its_buffer_is_used_again() -> None:
    run = TwinRun()
    run.all_stage()
    for turn in range(8):
        for rank in TWINS:
            run.ask(rank, skip=rank == turn % 3)
        for rank in TWINS:
            run.write(rank)
        run.all_stage()
    assert [shard.step for shard in run.buffers.inventory()] == [14, 16]
    assert len(run.buffers.buffers) <= 4


def test_twins_with_different_layouts_stage_whole_shards() -> None:
    run = TwinRun()
    run.all_stage()
    run.ask(0)
    run.asked.add(1)
    run.step[1] += 1
    changes = run.buffers.request(1, BYTES, Ask(1, 2, BYTES))
    assert [change for change in changes if isinstance(change, Differ)] == [Differ(TWINS)]
    run.take(changes)
    assert run.granted[1].parts == 1 and run.granted[1].buffer != run.granted[0].buffer
    run.write(0)
    run.write(1)
    run.ask(2)
    run.write(2)
    assert (1, 0) in run.buffers.complete() and (1, 1) not in run.buffers.complete()
    run.all_stage()
    assert run.buffers.complete()[0] == (1, 2)
    assert {grant.parts for grant in run.granted.values()} <= {1}


def test_a_worker_may_not_write_what_it_was_not_given() -> None:
    run = TwinRun()
    run.ask(0)
    with pytest.raises(ValueError, match="buffer 1 is not writable by slot 1"):
        run.buffers.staged(1, 1, StagedShard(0, 1, 0, 1, BYTES))


def test_a_launch_with_other_twins_finds_what_was_staged() -> None:
    run = TwinRun()
    run.all_stage()
    run.all_stage()
    run.buffers.stop()
    run.buffers.launch(2, [(0, 2), (1, 3)], (1, 1))
    assert 1 in {shard.step for shard in run.buffers.inventory()}
    assert (1, 1) in run.buffers.complete()


MOVES = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "write", "write", "skip", "pin", "unpin"]),
              st.sampled_from(TWINS)),
    max_size=120,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(MOVES)
def test_two_whole_steps_are_held_and_no_twin_waits_for_ever(moves: list[tuple[str, int]]) -> None:
    run = TwinRun()
    for move, rank in moves:
        match move:
            case "ask" | "skip":
                run.ask(rank, skip=move == "skip")
            case "write":
                run.write(rank)
            case "pin":
                held = [b for b in run.buffers.buffers.values() if b.content]
                if held and not run.pins:
                    run.pins.append(held[0].number)
                    run.buffers.pin(held[0].number)
            case "unpin":
                if run.pins:
                    run.take(run.buffers.unpin(run.pins.pop()))
        held_steps = {shard.step for shard in run.buffers.inventory()}
        assert set(run.whole()[-2:]) <= held_steps
        assert len(run.buffers.buffers) <= 5
    for _ in range(4):  # a twin that waits gets a buffer as the others go on
        for rank in TWINS:
            run.write(rank)
        for rank in TWINS:
            run.ask(rank)
    for _ in TWINS:
        for rank in TWINS:
            run.write(rank)
    assert not run.asked


# -- the machine ------------------------------------------------------------------------------
class TwinHarness(AgentHarness):
    """One node with two ranks of DDP; the second one persists."""

    def launch_twins(self, **more: object) -> tuple[Command, ...]:
        group = membership(mesh=Mesh(replicate=2), workers_per_node=2)
        seats = tuple(WorkerSeat(rank, rank, 0, rank == 1) for rank in range(2))
        launch = m.LaunchWorkers(
            action_id=11, membership=group, node_rank=0, seats=seats, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        out = self.receive(launch)
        for rank in range(2):
            out += self.give_forked(rank)
        return out

    def give_forked(self, rank: int) -> tuple[Command, ...]:
        from holdfast.workers.agent.machine import inputs

        return self.give(inputs.WorkerForked(1, rank, 100 + rank))

    def ask(self, rank: int, step: int, layout: int = 1) -> tuple[Command, ...]:
        request = worker_protocol.BufferRequest(
            num_bytes=BYTES, shared=True, step=step, layout=layout
        )
        return self.from_worker(rank, request)

    def write(self, rank: int, step: int, buffer: int, sample: int = 0) -> tuple[Command, ...]:
        staged = worker_protocol.Staged(buffer=buffer, step=step, num_bytes=BYTES, sample=sample)
        return self.from_worker(rank, staged)


def test_a_launch_names_the_twins_of_each_worker() -> None:
    forks = of(commands.Fork, TwinHarness().launch_twins())
    assert [fork.twins for fork in forks] == [(0, 1), (0, 1)]
    assert [fork.twins for fork in of(commands.Fork, AgentHarness().launch())] == [(0,), (1,)]


def test_the_shard_is_sealed_and_written_to_storage_once_when_both_parts_are_there() -> None:
    harness = TwinHarness()
    harness.launch_twins(persist_every_steps=1)
    grants = [of(commands.ToRank, harness.ask(rank, 0))[0] for rank in range(2)]
    assert [(grant.buffer, grant.message.part, grant.message.parts) for grant in grants] == [
        (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    out = harness.write(1, 0, buffer=1)
    assert not of(commands.SealBuffer, out) and not of(commands.WriteStorage, out)
    out = harness.write(0, 0, buffer=1)
    kinds = [type(c) for c in out if isinstance(c, commands.SealBuffer | commands.WriteStorage)]
    assert kinds == [commands.SealBuffer, commands.WriteStorage]
    assert harness.staged() == {(1, 0, 0)}


def test_the_last_step_is_written_when_all_twins_have_finished() -> None:
    harness = TwinHarness()
    harness.launch_twins(persist_every_steps=1000)
    for rank in range(2):
        harness.ask(rank, 0)
    harness.write(1, 0, buffer=1)
    assert not of(commands.WriteStorage, harness.from_worker(1, worker_protocol.Finished(step=0)))
    harness.write(0, 0, buffer=1)
    out = harness.from_worker(0, worker_protocol.Finished(step=0))
    assert [c.staged.step for c in of(commands.WriteStorage, out)] == [0]


def test_a_worker_that_will_stage_has_its_buffers_allocated_before() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    out: tuple[Command, ...] = ()
    for rank in range(2):
        out += harness.from_worker(
            rank, worker_protocol.BufferRequest(num_bytes=BYTES, shared=True)
        )
    assert len(of(commands.MakeBuffer, out)) == 3
    early = {(c.rank, c.buffer, c.message.parts) for c in of(commands.ToRank, out)}  # type: ignore[union-attr]
    assert early == {(rank, number, 0) for rank in range(2) for number in (1, 2, 3)}
    out = harness.ask(0, 0)
    assert not of(commands.MakeBuffer, out)
    assert [c.message for c in of(commands.ToRank, out)] == [
        worker_protocol.BufferFree(buffer=1, part=0, parts=2)
    ]


def test_small_state_is_staged_whole_without_a_word() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    out: tuple[Command, ...] = ()
    for rank in range(2):
        for _ in range(3):
            out += harness.from_worker(rank, worker_protocol.BufferRequest(num_bytes=BYTES))
    assert len(of(commands.MakeBuffer, out)) == len(of(commands.ToRank, out)) == 6
    assert not of(m.AgentEvent, out)
    for step in range(4):
        harness.stage(step)
    assert harness.staged() == {(1, 2, 0), (1, 3, 0)}


def test_different_state_of_twins_is_reported() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    harness.ask(0, 0, layout=1)
    out = harness.ask(1, 0, layout=2)
    (event,) = of(m.AgentEvent, out)
    assert "ranks 0, 1 have one shard index and different state" in event.text
    (grant,) = of(commands.ToRank, out)
    assert grant.rank == 1 and grant.message.parts == 1  # type: ignore[union-attr]


def test_state_of_twins_that_was_not_the_same_is_not_held() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    for rank in range(2):
        harness.ask(rank, 0)
    out = harness.write(0, 0, buffer=1, sample=5) + harness.write(1, 0, buffer=1, sample=6)
    assert "different state" in of(m.AgentEvent, out)[0].text
    assert harness.staged() == set()
    for rank in range(2):
        (grant,) = of(commands.ToRank, harness.ask(rank, 1))
        assert grant.message.parts == 1  # type: ignore[union-attr]
        harness.write(rank, 1, buffer=grant.message.buffer, sample=rank)  # type: ignore[union-attr]
    assert harness.staged() == {(1, 1, 0)}


def test_a_part_that_was_thrown_away_may_be_staged_again() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    for rank in range(2):
        harness.ask(rank, 0)
    harness.write(0, 0, buffer=1)
    harness.from_worker(1, worker_protocol.BufferReturned(buffer=1))
    assert harness.staged() == set()
    (grant,) = of(commands.ToRank, harness.ask(1, 0))
    assert grant.message == worker_protocol.BufferFree(buffer=1, part=1, parts=2)
    harness.write(1, 0, buffer=1)
    assert harness.staged() == {(1, 0, 0)}


def test_a_part_that_was_thrown_away_does_not_keep_its_buffer() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    for rank in range(2):
        harness.ask(rank, 0)
    harness.from_worker(1, worker_protocol.BufferReturned(buffer=1))
    harness.write(0, 0, buffer=1)
    for step in range(1, 5):
        for rank in range(2):
            assert of(commands.ToRank, harness.ask(rank, step))
        for rank in range(2):
            buffers = harness.machine.tiers.buffers.buffers.values()
            number = next(b.number for b in buffers if b.filling and b.filling.step == step)
            harness.write(rank, step, buffer=number)
    assert harness.staged() == {(1, 3, 0), (1, 4, 0)}
    assert len(harness.machine.tiers.buffers.buffers) == 3


def test_a_requested_step_is_answered_when_all_parts_are_there() -> None:
    harness = TwinHarness()
    harness.launch_twins()
    harness.receive(m.Stage(action_id=9, generation=1, step=0, hold=True))
    for rank in range(2):
        harness.ask(rank, 0)
    out = harness.write(0, 0, buffer=1)
    out += harness.from_worker(0, worker_protocol.Progress(step=0))
    assert not of(m.ShardStaged, out)
    assert of(m.ShardStaged, harness.write(1, 0, buffer=1))[0].ok


@pytest.mark.parametrize("most", [1, 2, 3])
def test_twins_train_on_where_memory_is_short(most: int) -> None:
    run = TwinRun()
    run.buffers.most = most
    for step in range(10):
        run.all_stage()
        assert [shard.step for shard in run.buffers.inventory()][-1] == step
        assert len(run.buffers.buffers) <= most
