"""Agents that train nothing and speak the real protocol over real sockets.

A FakeAgent does what its controller says and reports a step at every `advance`. A FakeBackend
starts them in this process. Nothing here waits for real time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.base import NodeGone, NoRoom, Starts
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import Exit, NodeFacts, ShardFile, StagedShard, WorkerBeat
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from tests.documents import job_document

from .frames import Frames

BOUND_S = 20.0
"""The longest wait of a test; one that reaches it has failed."""
SHARD_BYTES = 100


def make_job(name: str = "tiny", **spec: Any) -> TrainingJob:
    """Two nodes of two workers, HSDP 2 x 2, three steps."""
    recipe = {"name": "pretrain", "config": {"steps": 1000, "globalBatch": 8}}
    return job_from_mapping(
        job_document(
            name,
            {
                "entrypoint": {"recipe": recipe}, "nodes": {"min": 1, "max": 2},
                "workersPerNode": 2, "parallelism": {"shard": 2},
                "recovery": {"replacementWaitSeconds": 0.2}, **spec,
            },
        )
    )  # fmt: skip


def drive(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario with a time limit."""
    asyncio.run(asyncio.wait_for(scenario, 2 * BOUND_S))


def node_facts() -> NodeFacts:
    return NodeFacts(hostname="here", address="127.0.0.1", data_port=1, slots=2, cpus=2)


@dataclass
class FakeAgent:
    """One node."""

    name: str
    directory: JobDirectory
    on_change: Callable[[], None]
    frames: Frames | None = None
    launch: wire.LaunchWorkers | None = None
    staged: tuple[StagedShard, ...] = ()
    received: list[Any] = field(default_factory=list)
    alive: bool = True
    silent: bool = False
    answers: bool = True
    """Launch and Stop are answered."""
    auto: bool = False
    """Every launch continues to its first step by itself."""
    last_beat: wire.Heartbeat = field(default_factory=lambda: wire.Heartbeat(generation=0))
    exits: list[wire.WorkerExited] = field(default_factory=list)
    """Exits of the current generation; sent again after every reconnect."""

    async def live(self) -> None:
        """Connect, and reconnect after every lost connection, until killed."""
        while self.alive:
            place = self.directory.controller()
            if place is None:
                await asyncio.sleep(0.01)
                continue
            with contextlib.suppress(OSError):
                self.frames = await Frames.dial(place["address"], place["port"])
                beating = asyncio.create_task(self._beat())
                try:
                    await self._session()
                finally:
                    beating.cancel()
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        """Heartbeats for tests that last longer than the heartbeat timeout."""
        while True:
            await asyncio.sleep(0.5)
            self.say(self.last_beat)

    async def _session(self) -> None:
        assert self.frames is not None
        generation = self.launch.membership.generation if self.launch else 0
        ranks = tuple(seat.rank for seat in self.launch.seats) if self.launch else ()
        self.frames.send(
            wire.Hello(
                token=self.directory.token(), job=self.directory.name, node=self.name,
                joined=wire.NodeJoined(
                    facts=node_facts(), generation=generation, ranks=ranks, staged=self.staged,
                    offered_port=4000,
                ),
            )
        )  # fmt: skip
        # As the real agent does: reconnect if no Welcome comes soon.
        patience_s: float | None = 1.0
        while (message := await asyncio.wait_for(self.frames.receive(), patience_s)) is not None:
            patience_s = None
            self.received.append(message)
            self._obey(message)
            self.on_change()

    def _obey(self, message: Any) -> None:
        match message:
            case wire.Welcome():
                self.say(wire.StandbysReported(ready=True))
                for one in self.exits:
                    self.say(one)
                if self.auto and self.launch is not None and not self.exits:
                    self._first_step()
            case wire.LaunchWorkers() if self.answers:
                self.launch, self.exits = message, []
                generation = message.membership.generation
                launched = wire.Launched(
                    action_id=message.action_id, generation=generation, ok=True
                )
                self.say(launched)
                if self.auto:
                    self._first_step()
            case wire.StopWorkers() if self.answers:
                self.launch, self.exits = None, []
                self.say(
                    wire.GroupStopped(
                        action_id=message.action_id, generation=message.generation,
                        staged=self.staged, offered_port=4001,
                    )
                )  # fmt: skip
            case wire.Persist():
                self.persist(message.step)
            case wire.Refused(final=False):
                assert self.frames is not None
                self.frames.close()
            case wire.Refused() | wire.Shutdown():
                self.alive = False
                assert self.frames is not None
                self.frames.close()
            case _:
                pass

    def _first_step(self) -> None:
        assert self.launch is not None
        restore = self.launch.membership.restore
        self.advance(restore.step + 1 if restore else 0)

    def say(self, message: wire.Message) -> None:
        """Lost without a connection, as with a real agent."""
        if self.frames is not None and not self.frames.writer.is_closing():
            self.frames.send(message)

    def advance(self, step: int, loss: float = 1.0) -> None:
        """All workers here have finished `step` and staged it."""
        assert self.launch is not None
        membership = self.launch.membership
        beats = tuple(
            WorkerBeat(
                rank=seat.rank, phase="train", step=step, ticks=step + 2, loss=loss, tokens=512,
                step_s=0.01,
            )
            for seat in self.launch.seats
        )  # fmt: skip
        self.staged = tuple(
            StagedShard(
                step, membership.generation, seat.shard, membership.mesh.num_shards, SHARD_BYTES
            )
            for seat in self.launch.seats
        )
        self.say(wire.Heartbeat(generation=membership.generation, workers=beats, staged_step=step))

    def persist(self, step: int) -> None:
        """Write what is staged to storage, as the real agent does."""
        for one in self.staged:
            name = shard_file_name(one.shard, one.num_shards)
            place = Path(self.directory.checkpoint_path(self.directory.job()))
            path = place / directory_name(one.step, one.generation)
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(bytes(one.num_bytes))
            shard = ShardFile(
                one.step, one.generation, one.shard, one.num_shards, name, one.num_bytes, "00"
            )
            self.say(wire.ShardPersisted(generation=one.generation, shard=shard, seconds=0.5))

    def exit_worker(self, index: int = 0, **how: Any) -> None:
        assert self.launch is not None
        seat = self.launch.seats[index]
        exit = Exit(rank=seat.rank, local_rank=seat.local_rank, **{"signal": 9, **how})
        exited = wire.WorkerExited(generation=self.launch.membership.generation, exit=exit)
        self.exits.append(exited)
        self.say(exited)

    def kill(self) -> None:
        self.alive = False
        if self.frames is not None:
            self.frames.writer.transport.abort()


class FakeBackend:
    """Nodes are tasks. They outlive a controller: `open` of the next one finds them."""

    def __init__(self) -> None:
        self.directory: JobDirectory | None = None
        self.agents: dict[str, FakeAgent] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.number = 0
        self.auto = False
        self.room = True
        self.node_limit: Callable[[], int | None] = lambda: None
        self.changed = asyncio.Event()
        self.on_node_gone: Callable[[NodeGone], None] = lambda gone: None

    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        self.on_node_gone = on_node_gone

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        if not self.room:
            raise NoRoom("the harness is full")
        assert self.directory is not None
        names = []
        for _ in range(count):
            agent = FakeAgent(f"node-{self.number}", self.directory, self.changed.set)
            agent.auto = self.auto
            self.number += 1
            self.agents[agent.name] = agent
            self.tasks[agent.name] = asyncio.create_task(agent.live())
            names.append(agent.name)
        return tuple(names)

    async def release_node(self, node: str) -> None:
        self.kill(node)

    def kill(self, node: str) -> None:
        """The same as SIGKILL: the process and its sockets are gone."""
        agent = self.agents.pop(node, None)
        if agent is not None:
            agent.kill()
            self.tasks.pop(node).cancel()
            self.on_node_gone(NodeGone(node, "killed"))

    async def list_nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self.agents))

    def starts(self) -> Starts:
        return Starts()

    async def close(self, *, release: bool) -> None:
        if release:
            for name in list(self.agents):
                self.kill(name)

    def withhold(self, seconds: float) -> None:
        self.room = False
