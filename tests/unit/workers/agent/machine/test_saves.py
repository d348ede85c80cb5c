"""An unplanned stop lets a rank end the save that its script has declared."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Stack
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs

from .harness import SECOND_NS, AgentHarness, of, running

STOP = m.StopWorkers(action_id=7, generation=1, save_grace_s=limits.SAVE_GRACE_S)
SAVES = worker_protocol.PhaseChanged(phase="save")
TRAINS = worker_protocol.PhaseChanged(phase="train")


def saving() -> AgentHarness:
    harness = running()
    harness.from_worker(0, SAVES)
    harness.from_worker(1, TRAINS)
    return harness


def killed(outputs: Any) -> list[tuple[int, int]]:
    return [(one.rank, one.signal) for one in of(commands.Kill, outputs)]


def test_only_the_rank_that_saves_lives_on_until_its_save_ends() -> None:
    harness = saving()
    out = harness.receive(STOP)
    assert killed(out) == [(1, 9)]
    assert [(one.ranks, one.by_signal) for one in of(commands.TakeStacks, out)] == [((0,), False)]
    harness.worker_ends(1, signal=9)
    assert killed(harness.after(3)) == []
    assert killed(harness.from_worker(0, TRAINS)) == [(0, 9)]
    answer = of(m.GroupStopped, harness.worker_ends(0, signal=9))
    assert [one.action_id for one in answer] == [7]
    assert all(exit.by_us for exit in answer[0].exits)


def test_a_save_that_waits_for_a_peer_is_killed_at_once() -> None:
    harness = saving()
    harness.receive(STOP)
    stack = Stack(rank=0, text="barrier", in_collective=True)
    out = harness.give(inputs.StacksTaken(1, (stack,), by_signal=False))
    assert killed(out) == [(0, 9)] and not of(m.GroupInspected, out)


def test_the_grace_for_a_save_is_bounded() -> None:
    harness = saving()
    harness.receive(STOP)
    for _ in range(int(limits.SAVE_GRACE_S / 0.5) - 1):
        harness.now_ns = harness.machine.next_deadline_ns() or 0
        assert (0, 9) not in killed(harness.give(inputs.ClockTick()))
    harness.now_ns = int(limits.SAVE_GRACE_S * SECOND_NS)
    assert (0, 9) in killed(harness.give(inputs.ClockTick()))


def test_without_a_declared_save_all_are_killed_at_once() -> None:
    harness = running()
    out = harness.receive(STOP)
    assert killed(out) == [(0, 9), (1, 9)] and not of(commands.TakeStacks, out)


def test_a_stop_without_that_grace_kills_a_save_too() -> None:
    harness = saving()
    out = harness.receive(m.StopWorkers(action_id=7, generation=1))
    assert killed(out) == [(0, 9), (1, 9)]
