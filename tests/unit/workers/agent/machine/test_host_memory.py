"""An agent plans with what it measures before it gives buffers or takes copies."""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.host_memory import HostRoom, reserve_bytes
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs

from .harness import AgentHarness, of, request_buffers, running

BUFFER, GIB = 100, 2**30
UNIT = 2 * BUFFER
"""One buffer for each of the two workers."""
BUDDY = {"buddy": "b", "buddy_address": "x", "buddy_port": 1}


def harness_with(units: float, **launch: object) -> AgentHarness:
    """Launched on a node with usable memory for so many buffers of each worker."""
    harness = running(**launch)
    measure(harness, units)
    return harness


def measure(harness: AgentHarness, units: float, held: int = 0) -> None:
    reserve = reserve_bytes(HostRoom(GIB, GIB), shard_bytes=BUFFER, workers=2)
    harness.give(inputs.MemoryMeasured(GIB, int(units * UNIT) + reserve, held))


def num_buffers(harness: AgentHarness) -> list[int]:
    return [len(list(harness.machine.tiers.buffers.of_slot(slot))) for slot in range(2)]


def report(out: object) -> m.NodeMemoryPlanned:
    (found,) = of(m.NodeMemoryPlanned, out)  # type: ignore[arg-type]
    return found


def test_two_buffers_instead_of_three_where_three_do_not_fit() -> None:
    harness = harness_with(2.5)
    planned = report(request_buffers(harness))
    assert num_buffers(harness) == [2, 2]
    assert (planned.memory.grant.buffers, planned.memory.grant.given_up) == (2, "buffers")


def test_a_worker_gets_one_buffer_until_all_have_asked() -> None:
    """The others' needs are not known before: here the second one leaves room for two each."""
    harness = harness_with(4)
    for _ in range(3):
        harness.from_worker(0, worker_protocol.BufferRequest(num_bytes=BUFFER))
    assert num_buffers(harness) == [1, 0]
    measure(harness, 2)
    harness.from_worker(1, worker_protocol.BufferRequest(num_bytes=BUFFER))
    assert num_buffers(harness) == [2, 1]


def test_a_worker_that_waits_gets_another_one_before_all_have_asked() -> None:
    harness = harness_with(4)
    for _ in range(3):
        harness.from_worker(0, worker_protocol.BufferRequest(num_bytes=BUFFER))
    (given,) = harness.machine.tiers.buffers.of_slot(0)
    staged = worker_protocol.Staged(buffer=given.number, step=0, num_bytes=BUFFER)
    harness.from_worker(0, staged)
    out = harness.from_worker(0, worker_protocol.BufferWanted())
    assert of(commands.MakeBuffer, out) and num_buffers(harness) == [2, 0]


def test_with_two_buffers_both_workers_stage_step_after_step() -> None:
    harness = harness_with(2)
    request_buffers(harness)
    for step in range(6):
        for rank in range(2):
            if not any(b.writable for b in harness.machine.tiers.buffers.of_slot(rank)):
                harness.from_worker(rank, worker_protocol.BufferWanted())
        harness.stage(step)
        assert (1, step, 0) in harness.staged() and (1, step, 1) in harness.staged()
    assert num_buffers(harness) == [2, 2]


def test_without_memory_for_one_buffer_the_worker_gets_the_reason() -> None:
    harness = running()
    harness.give(inputs.MemoryMeasured(1000, UNIT - 1, 0))
    out = harness.from_worker(0, worker_protocol.BufferRequest(num_bytes=BUFFER))
    (refusal,) = [
        c.message
        for c in of(commands.ToRank, out)
        if isinstance(c.message, worker_protocol.NoBuffer)
    ]
    assert "spec.resources.memory" in refusal.detail and "expected at least" in refusal.detail
    assert not of(commands.MakeBuffer, out)


def test_a_node_without_memory_for_copies_refuses_them_and_makes_none() -> None:
    harness = harness_with(5, **BUDDY)
    assert report(request_buffers(harness)).memory.grant.given_up == "copies"
    refusal, _ = harness.machine.accept_copy(StagedShard(0, 1, 0, 2, BUFFER))
    assert refusal == "it has no memory for copies"
    out = [*harness.stage(0), *harness.stage(1)]
    assert not of(commands.PushToBuddy, out)
    assert not of(commands.PushToBuddy, harness.receive(m.CopyStep(generation=1, step=2)))


def test_a_copy_that_comes_before_the_own_workers_ask_is_planned_too() -> None:
    harness = harness_with(5, **BUDDY)
    refusal, before = harness.machine.accept_copy(StagedShard(0, 1, 0, 2, BUFFER))
    assert isinstance(refusal, str) and report(before).memory.shard_bytes == BUFFER
    harness = harness_with(9, **BUDDY)
    number, _ = harness.machine.accept_copy(StagedShard(0, 1, 0, 2, BUFFER))
    assert isinstance(number, int)


def test_own_buffers_count_as_free_in_the_next_generation() -> None:
    harness = harness_with(4)
    request_buffers(harness)
    harness.stage(0)
    harness.receive(m.StopWorkers(action_id=7, generation=1))
    for rank in range(2):
        harness.worker_ends(rank, signal=9)
    harness.launch(2)
    measure(harness, 0.5, held=int(3.5 * UNIT))
    out = request_buffers(harness, 2)
    assert not of(m.NodeMemoryPlanned, out), "the controller knows this plan"
    current = harness.machine.tiers.memory.current
    assert current is not None and current.grant.buffers == 4


def test_nodes_of_one_machine_share_what_is_free() -> None:
    harness = running(nodes_on_machine=2)
    harness.give(inputs.MemoryMeasured(1000, 10 * UNIT, 0))
    planned = report(request_buffers(harness))
    assert (planned.memory.room.limit_bytes, planned.memory.room.available_bytes) == (500, 5 * UNIT)


def test_without_a_measurement_nothing_is_limited() -> None:
    harness = running()
    out = request_buffers(harness)
    assert num_buffers(harness) == [3, 3] and not of(m.NodeMemoryPlanned, out)


def test_memory_for_the_shared_buffer_of_twins_is_none_for_a_buffer_each() -> None:
    """Twins whose state is small stage alone: that is known from the first one that asks."""
    harness = harness_with(0, mesh=Mesh(replicate=2))
    harness.give(inputs.MemoryMeasured(GIB, int(1.5 * BUFFER), 0))
    for rank in range(2):
        out = harness.from_worker(rank, worker_protocol.BufferRequest(num_bytes=BUFFER))
        assert any(
            isinstance(c.message, worker_protocol.NoBuffer) for c in of(commands.ToRank, out)
        )
        assert not of(commands.MakeBuffer, out)
