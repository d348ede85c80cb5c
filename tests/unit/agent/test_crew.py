"""The order of news about a worker, with real sockets and a forkserver played by the test."""

from __future__ import annotations

import asyncio
import socket

from orchestrator.protocol.facts import Membership, WorkerSeat
from orchestrator.protocol.mesh import Mesh
from workers import wire
from workers.agent import facts as f
from workers.agent import forklink
from workers.agent.crew import Crew

MEMBERSHIP = Membership(
    generation=1,
    mesh=Mesh(),
    num_nodes=1,
    workers_per_node=1,
    master_address="127.0.0.1",
    master_port=1,
    restart_count=0,
)
ASSIGN = wire.Assign(
    membership=MEMBERSHIP, seat=WorkerSeat(0, 0, 0, True), node_rank=0, environment={}
)


def test_what_a_worker_said_is_heard_before_its_end_even_if_it_never_read() -> None:
    """The kernel reports the unread Assign as ECONNRESET ahead of the worker's own messages."""

    async def scene() -> list[f.Input]:
        heard: list[f.Input] = []
        ended = asyncio.Event()

        def tell(given: f.Input) -> None:
            heard.append(given)
            if isinstance(given, f.WorkerEnded):
                ended.set()

        ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        crew = Crew(asyncio.get_running_loop(), tell)
        crew.attach(ours)
        crew.seat(ASSIGN, None)
        request, fds = forklink.receive(server)
        assert isinstance(request, forklink.ForkWorker)
        forklink.send(server, forklink.Forked(worker=request.worker, pid=1))
        with socket.socket(fileno=fds[0]) as link:
            wire.send(link, wire.Staged(buffer=1, step=4, num_bytes=8))
            wire.send(link, wire.Progress(step=4))
        forklink.send(server, forklink.Ended(worker=request.worker, code=None, signal=9))
        await asyncio.wait_for(ended.wait(), 30)
        server.close()
        return heard

    heard = asyncio.run(scene())
    kinds = [x.message if isinstance(x, f.FromRank) else x for x in heard]
    assert [type(kind) for kind in kinds[-3:]] == [wire.Staged, wire.Progress, f.WorkerEnded]
