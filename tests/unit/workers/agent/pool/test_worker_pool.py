"""The order of a worker's messages and its exit, with real sockets and a fake forkserver."""

from __future__ import annotations

import asyncio
import socket

from holdfast.orchestrator.protocol.facts import Membership, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.machine import inputs
from holdfast.workers.agent.pool import fork_protocol
from holdfast.workers.agent.pool.worker_pool import WorkerPool

MEMBERSHIP = Membership(
    generation=1,
    mesh=Mesh(),
    num_nodes=1,
    workers_per_node=1,
    master_address="127.0.0.1",
    master_port=1,
    restart_count=0,
)
ASSIGN = worker_protocol.Assign(
    membership=MEMBERSHIP, seat=WorkerSeat(0, 0, 0, True), node_rank=0, environment={}
)


def test_messages_of_a_worker_come_before_its_exit_even_if_it_never_read_its_socket() -> None:
    """The kernel reports the unread Assign as ECONNRESET ahead of the worker's own messages."""

    async def scene() -> list[inputs.Input]:
        received: list[inputs.Input] = []
        ended = asyncio.Event()

        def note(given: inputs.Input) -> None:
            received.append(given)
            if isinstance(given, inputs.WorkerEnded):
                ended.set()

        ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pool = WorkerPool(asyncio.get_running_loop(), note)
        pool.attach(ours)
        pool.assign(ASSIGN, None)
        request, fds = fork_protocol.receive(server)
        assert isinstance(request, fork_protocol.ForkWorker)
        fork_protocol.send(server, fork_protocol.Forked(worker=request.worker, pid=1))
        with socket.socket(fileno=fds[0]) as link:
            worker_transport.send(link, worker_protocol.Staged(buffer=1, step=4, num_bytes=8))
            worker_transport.send(link, worker_protocol.Progress(step=4))
        fork_protocol.send(
            server, fork_protocol.ProcessEnded(worker=request.worker, code=None, signal=9)
        )
        await asyncio.wait_for(ended.wait(), 30)
        server.close()
        return received

    received = asyncio.run(scene())
    kinds = [x.message if isinstance(x, inputs.FromRank) else x for x in received]
    assert [type(kind) for kind in kinds[-3:]] == [
        worker_protocol.Staged,
        worker_protocol.Progress,
        inputs.WorkerEnded,
    ]
