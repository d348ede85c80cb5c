"""The agents of bench/scale.py, all in one process: real connections, no workers.

They answer as real agents do: each launch and each stop at once, in which all workers keep their
processes, and heartbeats in the interval of the Welcome. Commands come line by line on standard
input: `join`, `reconnect`, `lose NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time

from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import NodeFacts, StagedShard, WorkerBeat
from holdfast.orchestrator.protocol.framing import FrameReader

STEP_S = 1.0
CONNECTING = 64
"""Connections that are opened at the same time."""


class Agent(asyncio.Protocol):
    """One node."""

    def __init__(self, number: int, port: int, ranks: int) -> None:
        self.number, self.port, self.ranks = number, port, ranks
        self.launch: wire.LaunchWorkers | None = None
        self.launched_s = 0.0
        self.first_step = 0
        self.interval_s = 0.0
        self.alive = True
        self._transport: asyncio.Transport | None = None
        self._welcomed = False
        self._answered = asyncio.Event()
        self._gone = asyncio.Event()

    async def connect(self) -> None:
        """Repeat until there is a Welcome: a busy controller may close a connection."""
        self._welcomed = False
        while not self._welcomed:
            if self._transport is not None:
                self._transport.abort()
                await self._gone.wait()
            self._reader, self._answered = FrameReader(), asyncio.Event()
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self, "127.0.0.1", self.port)
            self._hello()
            await self._answered.wait()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set()
        self._answered.set()

    def _hello(self) -> None:
        number = self.number
        facts = NodeFacts(
            hostname=f"host-{number}",
            address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            data_port=7000,
            slots=self.ranks,
            cpus=64,
            memory_bytes=2**40 + number * 4096,
        )
        self._send(
            wire.Hello(
                token="t",
                job="big",
                node=f"node-{number}",
                joined=wire.NodeJoined(
                    facts=facts,
                    offered_port=4000,
                    generation=self.launch.membership.generation if self.launch else 0,
                    ranks=tuple(seat.rank for seat in self.launch.seats) if self.launch else (),
                    staged=self._staged(),
                ),
            )
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._gone = transport, asyncio.Event()

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            self._obey(wire.decode(body))

    def lose(self) -> None:
        assert self._transport is not None
        self.alive = False
        self._transport.abort()

    def _obey(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Welcome():
                if not self.interval_s:
                    share = self.number * 0.618 % 1  # agents do not beat at the same moment
                    later_s = share * message.heartbeat_interval_s
                    asyncio.get_running_loop().call_later(later_s, self._beat)
                self.interval_s = message.heartbeat_interval_s
                self._welcomed = True
                self._answered.set()
            case wire.Refused():  # on a busy machine it was declared lost
                self.alive, self._welcomed = False, True
                self._answered.set()
            case wire.LaunchWorkers():
                restore = message.membership.restore
                self.launch, self.launched_s = message, time.monotonic()
                self.first_step = restore.step + 1 if restore is not None else 0
                generation = message.membership.generation
                self._send(
                    wire.Launched(action_id=message.action_id, generation=generation, ok=True)
                )
            case wire.StopWorkers():
                seats = self.launch.seats if self.launch is not None else ()
                staged, self.launch = self._staged(), None
                self._send(
                    wire.GroupStopped(
                        action_id=message.action_id,
                        generation=message.generation,
                        staged=staged,
                        offered_port=4001,
                        kept=tuple(seat.rank for seat in seats),
                    )
                )
            case _:
                pass

    def _step(self) -> int:
        return self.first_step - 1 + int((time.monotonic() - self.launched_s) / STEP_S)

    def _staged(self) -> tuple[StagedShard, ...]:
        """The last two steps of each rank."""
        if self.launch is None:
            return ()
        member, last = self.launch.membership, self._step()
        return tuple(
            StagedShard(step, member.generation, seat.shard, member.mesh.num_shards, 100)
            for step in (last - 1, last)
            if step >= 0
            for seat in self.launch.seats
        )

    def _beat(self) -> None:
        if not self.alive:
            return
        asyncio.get_running_loop().call_later(self.interval_s, self._beat)
        if not self._welcomed:
            return
        if self.launch is None:
            self._send(wire.Heartbeat(generation=0))
            return
        step = self._step()
        workers = tuple(
            WorkerBeat(
                rank=seat.rank, phase="train", step=step, ticks=step + 2, loss=1.0, tokens=512,
                step_s=STEP_S, quiet_s=0.1, counted_by="session", keeps=seat.rank == 0 or "",
            )
            for seat in self.launch.seats
        )  # fmt: skip
        generation = self.launch.membership.generation
        self._send(wire.Heartbeat(generation=generation, staged_step=step, workers=workers))

    def _send(self, message: wire.FromAgent) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(message))


async def connect_all(agents: list[Agent]) -> None:
    queue = iter(agents)

    async def connect_next() -> None:
        for agent in queue:
            await agent.connect()

    await asyncio.gather(*(connect_next() for _ in range(CONNECTING)))
    print("connected", flush=True)


async def serve(port: int, nodes: int, ranks: int) -> None:
    agents = {f"node-{number}": Agent(number, port, ranks) for number in range(nodes)}
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        if line[0] == "lose":
            agents[line[1]].lose()
        else:
            await connect_all([agent for agent in agents.values() if agent.alive])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "nodes", "ranks"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(given.port, given.nodes, given.ranks))


if __name__ == "__main__":
    main()
