"""The buddy tier at real size: a push may take many steps. Two real agent machines, FSDP over both,
and the controller's rounds; a step is the unit of time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast.orchestrator.core.copy_rounds import CopyScheduler
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import NodeFacts, StagedShard, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.machine import AgentMachine
from tests.unit.workers.members import membership

from ....core.harness import Transcript, spec

NAMES = ("a", "b")
FACTS = NodeFacts(hostname="h", address="1.1.1.1", data_port=1, slots=1)
STEPS, WARM_UP = 60, 20


@dataclass
class Push:
    done_at: float
    command: commands.PushToBuddy


@dataclass
class Pair:
    """Nodes a and b, each other's buddy, with one worker each. Pushes take `push_steps`."""

    push_steps: tuple[float, float]
    every: int = 1
    late_steps: int = 0
    """Orders of the controller arrive so many steps late."""
    lost_reports: int = 0
    """The first reports that do not reach the controller."""
    now_ns: int = 0
    pushes: list[Push | None] = field(default_factory=lambda: [None, None])
    free: list[list[int]] = field(default_factory=lambda: [[], []])
    late: list[tuple[int, int, m.CopyStep]] = field(default_factory=list)
    at: float = 0.0

    def __post_init__(self) -> None:
        job = spec({"min": 2, "max": 2}, workers=1, shard=2)
        self.state = Transcript(job).started("a", "b").state
        self.rounds = CopyScheduler()
        self.nodes = [AgentMachine(job="j", node=name, token="t", slots=1) for name in NAMES]
        for index in range(2):
            self.launch(index)

    def launch(self, index: int) -> None:
        group = membership(mesh=Mesh(shard=2), num_nodes=2)
        self.give(index, inputs.LinkUp(FACTS, 1))
        self.welcome(index)
        launch = m.LaunchWorkers(
            action_id=1, membership=group, node_rank=index,
            seats=(WorkerSeat(index, 0, index, True),), buddy=NAMES[1 - index],
            buddy_address="x", buddy_port=1,
        )  # fmt: skip
        self.give(index, inputs.Received(launch))
        self.give(index, inputs.WorkerForked(1, index, 100))
        for _ in range(3):
            self.from_worker(index, worker_protocol.BufferRequest(num_bytes=100))

    def welcome(self, index: int) -> None:
        welcome = m.Welcome(
            spec={}, spec_directory="", checkpoint_path="", log_directory="-",
            heartbeat_interval_s=0.5,
        )  # fmt: skip
        self.give(index, inputs.Received(welcome))

    def from_worker(self, index: int, message: worker_protocol.FromWorker) -> None:
        self.give(index, inputs.FromRank(1, index, message))

    def give(self, index: int, given: inputs.Input) -> None:
        self.now_ns += 1000
        for command in self.nodes[index].step(self.now_ns, given):
            match command:
                case commands.PushToBuddy():
                    self.pushes[index] = Push(self.at + self.push_steps[index], command)
                case commands.ToRank(message=worker_protocol.Buffer(buffer=number)):
                    self.free[index].append(number)
                case commands.ToRank(message=worker_protocol.BufferFree(buffer=number)):
                    self.free[index].append(number)
                case commands.Send(message=m.StepCopied() as report):
                    self.report(index, report)
                case _:
                    pass

    def report(self, index: int, report: m.StepCopied) -> None:
        if self.lost_reports:
            self.lost_reports -= 1
            return
        for order in self.rounds.observe(self.now_ns, NAMES[index], report, self.state):
            late = int(self.at) + self.late_steps
            self.late.append((late, NAMES.index(order.node), order.message))

    def deliver(self) -> None:
        while due := [one for one in self.late if one[0] <= self.at]:
            self.late.remove(due[0])
            self.give(due[0][1], inputs.Received(due[0][2]))

    def finish_pushes(self, until: float) -> None:
        while due := sorted(
            (push.done_at, index)
            for index, push in enumerate(self.pushes)
            if push is not None and push.done_at <= until
        ):
            self.at, index = due[0]
            push, self.pushes[index] = self.pushes[index], None
            buffer, _ = self.nodes[1 - index].accept_copy(push.command.staged)
            self.give(1 - index, inputs.CopyDone(buffer, True))
            self.give(index, inputs.PushDone(push.command.buffer, "", self.push_steps[index]))
            self.deliver()

    def step(self, step: int) -> None:
        """Both workers finish a step, one a moment after the other."""
        self.finish_pushes(step)
        self.at = float(step)
        self.deliver()
        for index in range(2):
            if (step + 1) % self.every == 0:
                assert self.free[index], f"{NAMES[index]} waits for a buffer at step {step}"
                number = self.free[index].pop(0)
                message = worker_protocol.Staged(buffer=number, step=step, num_bytes=100)
                self.from_worker(index, message)
            self.from_worker(index, worker_protocol.Progress(step=step))
            self.deliver()

    def left_by_the_loss_of(self, index: int) -> list[int]:
        """Steps whose two shards are in the other node's memory."""
        shards: dict[int, set[int]] = {}
        for staged in self.nodes[1 - index].tiers.inventory():
            shards.setdefault(staged.step, set()).add(staged.shard)
        return [step for step, held in shards.items() if len(held) == 2]


def usable(pair: Pair) -> tuple[int, int]:
    """(moments at which the loss of one node leaves a complete step, most steps lost then)."""
    count, most = 0, 0
    for step in range(STEPS):
        pair.step(step)
        if step < WARM_UP:
            continue
        for lost in (0, 1):
            whole = pair.left_by_the_loss_of(lost)
            count += bool(whole)
            most = max(most, step - max(whole, default=-1))
    return count, most


PUSHES = [
    (0.1, 0.1), (0.5, 0.5), (1, 1), (1.5, 1.5), (2, 2), (3, 3), (4, 4), (3, 4), (5, 5), (6, 7),
    (10, 10), (0.1, 10),
]  # fmt: skip


@pytest.mark.parametrize("push_steps", PUSHES)
def test_a_lost_node_always_leaves_a_complete_step(push_steps: tuple[float, float]) -> None:
    pair = Pair(push_steps)
    count, most = usable(pair)
    assert count == 2 * (STEPS - WARM_UP)
    assert most <= 2 * max(push_steps) + 3
    buffers = pair.nodes[0].tiers.buffers.buffers
    assert len(buffers) <= 5 and len(pair.nodes[0].tiers.copies.copies) <= 3


@pytest.mark.parametrize("every", [2, 5])
def test_copies_are_made_of_staged_steps_only(every: int) -> None:
    count, most = usable(Pair((3, 3), every=every))
    assert count == 2 * (STEPS - WARM_UP)
    assert most <= 2 * (3 + every) + every


@pytest.mark.parametrize("late_steps", [1, 3, 8])
def test_orders_that_come_too_late_name_a_later_step_the_next_time(late_steps: int) -> None:
    pair = Pair((0.5, 0.5), late_steps=late_steps)
    count, most = usable(pair)
    assert count == 2 * (STEPS - WARM_UP)
    assert most <= 4 * late_steps + 6


def test_a_push_that_becomes_slow_costs_no_complete_step() -> None:
    pair = Pair((0.1, 0.1))
    for step in range(30):
        pair.step(step)
        if step == 10:
            pair.push_steps = (12, 0.1)
        if step > 4:
            assert pair.left_by_the_loss_of(0) and pair.left_by_the_loss_of(1)


def test_a_failed_push_is_followed_by_another_step() -> None:
    pair = Pair((2, 2))
    for step in range(4):
        pair.step(step)
    push, pair.pushes[0] = pair.pushes[0], None
    pair.give(0, inputs.PushDone(push.command.buffer, "b: connection refused", 0.1))
    assert "could not copy" in pair.rounds.status
    before = pair.rounds.confirmed
    for step in range(4, 14):
        pair.step(step)
        assert pair.left_by_the_loss_of(0) and pair.left_by_the_loss_of(1)
    assert pair.rounds.confirmed > max(before, 4)


def test_a_report_that_was_lost_is_sent_again_after_a_reconnect() -> None:
    pair = Pair((0.5, 0.5), lost_reports=1)
    for step in range(6):
        pair.step(step)
    assert pair.rounds.confirmed == -1
    pair.give(0, inputs.LinkDown())
    pair.give(0, inputs.LinkUp(FACTS, 1))
    pair.welcome(0)
    for step in range(6, 12):
        pair.step(step)
    assert pair.rounds.confirmed > 6


def test_a_new_controller_goes_on_with_what_the_agents_hold() -> None:
    pair = Pair((3, 3))
    for step in range(12):
        pair.step(step)
    held = pair.left_by_the_loss_of(0)
    pair.rounds, pair.late = CopyScheduler(), []
    for index in range(2):
        pair.give(index, inputs.LinkDown())
    for step in range(12, 20):
        pair.step(step)
        assert max(held) in pair.left_by_the_loss_of(0)
    for index in range(2):
        pair.give(index, inputs.LinkUp(FACTS, 1))
        pair.welcome(index)
    for step in range(20, 34):
        pair.step(step)
        assert pair.left_by_the_loss_of(0) and pair.left_by_the_loss_of(1)
    assert pair.rounds.confirmed > 20


def test_the_status_names_the_interval_and_the_slowest_push() -> None:
    pair = Pair((2, 5))
    for step in range(30):
        pair.step(step)
    assert pair.rounds.status == "every 5 steps: the slowest push takes 5 s (b)"


def test_a_report_of_an_old_generation_orders_nothing() -> None:
    pair = Pair((1, 1))
    old = m.StepCopied(generation=7, wanted=0, step=0, staged_step=3)
    assert pair.rounds.observe(0, "a", old, pair.state) == []
    assert StagedShard(0, 1, 0, 2, 100) not in pair.nodes[0].tiers.inventory()
