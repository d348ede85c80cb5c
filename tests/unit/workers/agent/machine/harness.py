"""A harness for the agent's machine: one machine, two workers and a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import NodeFacts, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.commands import Command
from holdfast.workers.agent.machine.machine import AgentMachine
from tests.unit.workers.members import membership

SECOND_NS = 1_000_000_000
FACTS = NodeFacts(hostname="h", address="127.0.0.1", data_port=1, slots=2)


class AgentHarness:
    """One machine with two workers."""

    def __init__(self, *, joined: bool = True) -> None:
        self.machine = AgentMachine(job="j", node="node-0", token="t", slots=2)
        self.now_ns = 0
        if joined:
            self.join()

    def give(self, given: inputs.Input) -> tuple[Command, ...]:
        return self.machine.step(self.now_ns, given)

    def receive(self, message: m.ToAgent) -> tuple[Command, ...]:
        return self.give(inputs.Received(message))

    def after(self, seconds: float) -> tuple[Command, ...]:
        """Give a tick so many seconds later."""
        self.now_ns += int(seconds * SECOND_NS)
        return self.give(inputs.ClockTick())

    def join(self) -> tuple[Command, ...]:
        self.give(inputs.LinkUp(FACTS, 29500))
        return self.receive(
            m.Welcome(
                spec={},
                spec_directory="",
                checkpoint_path="",
                log_directory="",
                heartbeat_interval_s=0.5,
            )
        )

    def launch(self, generation: int = 1, **more: Any) -> tuple[Command, ...]:
        mesh, first = more.pop("mesh", Mesh(shard=2)), more.pop("first_rank", 0)
        names = ("restore", "kept_from", "ahead")
        at = {name: more.pop(name) for name in names if name in more}
        group = membership(generation=generation, mesh=mesh, workers_per_node=2, **at)
        seats = tuple(
            WorkerSeat(first + local, local, mesh.shard_index(first + local), True)
            for local in range(2)
        )
        out = self.receive(
            m.LaunchWorkers(
                action_id=10 + generation,
                membership=group,
                node_rank=0,
                seats=seats,
                **more,
            )
        )
        for rank in range(2):
            out += self.give(inputs.WorkerForked(generation, rank, 100 + rank))
        return out

    def from_worker(
        self, rank: int, message: worker_protocol.FromWorker, generation: int = 1
    ) -> tuple[Command, ...]:
        return self.give(inputs.FromRank(generation, rank, message))

    def worker_ends(
        self, rank: int, code: int | None = None, signal: int | None = None, generation: int = 1
    ) -> tuple[Command, ...]:
        return self.give(inputs.WorkerEnded(generation, rank, code, signal))

    def stage(self, step: int, generation: int = 1) -> tuple[Command, ...]:
        """Both workers stage a step into buffers that they may write."""
        out: tuple[Command, ...] = ()
        for rank in range(2):
            free = [b for b in self.machine.tiers.buffers.of_slot(rank) if b.writable]
            staged = worker_protocol.Staged(buffer=free[0].number, step=step, num_bytes=100)
            out += self.from_worker(rank, staged, generation)
        return out

    def staged(self) -> set[tuple[int, int, int]]:
        return {(s.generation, s.step, s.shard) for s in self.machine.tiers.inventory()}


def running(generation: int = 1, *, buffers: bool = False, **more: Any) -> AgentHarness:
    """A harness whose workers run, and have requested buffers or not."""
    harness = AgentHarness()
    harness.launch(generation, **more)
    if buffers:
        request_buffers(harness, generation)
    return harness


T = TypeVar("T")


def of(kind: type[T], outputs: Iterable[object]) -> list[T]:
    found = [o.message if isinstance(o, commands.Send) else o for o in outputs]
    return [o for o in found if isinstance(o, kind)]


def request_buffers(harness: AgentHarness, generation: int = 1) -> tuple[Command, ...]:
    out, wanted = tuple[Command, ...](), worker_protocol.BufferRequest(num_bytes=100)
    for rank in range(2):
        for _ in range(3):
            out += harness.from_worker(rank, wanted, generation)
    return out
