"""The order of a worker's messages and its exit, with real sockets and a fake forkserver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Callable

import msgspec
import pytest

from holdfast.orchestrator.protocol.facts import GroupProgress, WorkerSeat
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.pool import fork_protocol
from holdfast.workers.agent.pool.stack_activity import Inspection
from holdfast.workers.agent.pool.worker_pool import WorkerPool
from tests.unit.workers.members import assigned

ASSIGN = assigned()


def make_pool(
    give: Callable[[inputs.Input], object] = lambda given: None,
) -> tuple[WorkerPool, socket.socket]:
    """A pool, and its forkserver's end of the socket."""
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = WorkerPool(asyncio.get_running_loop(), give)
    pool.attach(ours)
    return pool, server


def requested(server: socket.socket) -> tuple[fork_protocol.ForkWorker, list[int]]:
    request, fds = fork_protocol.receive(server)
    assert isinstance(request, fork_protocol.ForkWorker)
    return request, fds


def test_a_standby_is_kept_for_each_local_rank_and_given_to_that_rank() -> None:
    async def scene() -> tuple[list[int], dict[int, int]]:
        pool, server = make_pool()
        pool.refill(3)
        given = {}
        for rank in (2, 0):
            seat = WorkerSeat(rank, rank, rank, True)
            pool.assign(msgspec.structs.replace(ASSIGN, seat=seat), None)
            given[rank] = next(
                p.local_rank for p in pool._processes.values() if p.seat == (1, rank)
            )
        pool.refill(3)
        server.setblocking(False)
        forked = []
        with contextlib.suppress(BlockingIOError):
            while True:
                request, fds = requested(server)
                forked.append(request.local_rank)
                for fd in fds:
                    os.close(fd)
        return forked, given

    assert asyncio.run(scene()) == ([0, 1, 2, 0, 2], {2: 2, 0: 0})


def test_a_rank_does_not_wait_for_a_standby_whose_libraries_are_still_imported() -> None:
    async def scene() -> list[int]:
        pool, server = make_pool()
        pool.imports.learned(("transformers",))
        pool.refill(1)
        pool.assign(ASSIGN, None)
        asked = []
        for _ in range(2):
            request, fds = requested(server)
            asked.append(request.local_rank)
            for fd in fds:
                os.close(fd)
        return asked

    assert asyncio.run(scene()) == [0, -1]


def test_messages_of_a_worker_come_before_its_exit_even_if_it_never_read_its_socket() -> None:
    """The kernel reports the unread Assign as ECONNRESET ahead of the worker's own messages."""

    async def scene() -> list[inputs.Input]:
        received: list[inputs.Input] = []
        ended = asyncio.Event()

        def note(given: inputs.Input) -> None:
            received.append(given)
            if isinstance(given, inputs.WorkerEnded):
                ended.set()

        pool, server = make_pool(note)
        pool.assign(ASSIGN, None)
        request, fds = requested(server)
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


@pytest.mark.parametrize(("injected", "dies_first"), [(False, True), (False, False), (True, True)])
def test_who_was_ending_before_our_signal_was_not_ended_by_it(
    injected: bool, dies_first: bool
) -> None:
    async def scene() -> bool:
        ended: asyncio.Future[inputs.Input] = asyncio.get_running_loop().create_future()
        pool, server = make_pool(
            lambda given: isinstance(given, inputs.WorkerEnded) and ended.set_result(given)
        )
        pool.assign(ASSIGN, None)
        request, _fds = requested(server)
        worker, child = request.worker, subprocess.Popen(["sleep", "600"])
        fork_protocol.send(server, fork_protocol.Forked(worker=worker, pid=child.pid))
        while not await asyncio.sleep(0.01, any(p.pid for p in pool._processes.values())):
            pass
        if injected:
            pool.kill(commands.Kill(1, 0, 9, injected=True))
        if dies_first:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        pool.kill(commands.Kill(1, 0, 9))
        child.kill()
        fork_protocol.send(server, fork_protocol.ProcessEnded(worker=worker, code=None, signal=9))
        found = await asyncio.wait_for(ended, 30)
        assert isinstance(found, inputs.WorkerEnded)
        return found.before_ours

    assert asyncio.run(scene()) == dies_first


def test_an_inspection_gets_what_the_pulse_thread_reports_and_no_more_than_came_in_time() -> None:
    group = GroupProgress("0", "default_pg", 7, "gloo:all_reduce", done=False)

    async def scene() -> list[Inspection]:
        pool, server = make_pool()
        pool.assign(ASSIGN, None)
        _, fds = requested(server)
        found = [await pool.inspect(1, 5, 9.0)]
        with socket.socket(fileno=fds[0]) as link, socket.socket(fileno=fds[2]) as asked:
            first = asyncio.ensure_future(pool.inspect(1, 0, 30.0))
            second = asyncio.ensure_future(pool.inspect(1, 0, 30.0))
            while not select.select([asked], [], [], 0)[0]:
                await asyncio.sleep(0)
            assert asked.recv(64) == b"?", "one request for both"
            worker_transport.send(link, worker_protocol.StackReport(text="Current thread"))
            worker_transport.send(link, worker_protocol.CollectivesReport(groups=(group,)))
            found += [await first, await second]
            late = asyncio.ensure_future(pool.inspect(1, 0, 0.01))
            worker_transport.send(link, worker_protocol.StackReport(text="only the stack"))
            found.append(await late)
        server.close()
        return found

    absent, first, second, late = asyncio.run(scene())
    assert absent == Inspection()
    assert first == second == Inspection("Current thread", (group,))
    assert late.groups == ()


def test_an_error_about_a_process_that_the_kernel_killed_is_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = [3]
    monkeypatch.setattr("holdfast.orchestrator.protocol.cgroup.memory_kills", lambda _: kills[0])
    text = "DataLoader worker (pid 7) is killed by signal: Killed. "
    failed = worker_protocol.Failed(error_type="RuntimeError", message=text, traceback="")

    async def scene() -> list[bool]:
        pool = WorkerPool(asyncio.get_running_loop(), lambda given: None)
        found = [pool._received(failed).out_of_memory]
        kills[0] += 1
        other = msgspec.structs.replace(failed, message="bad shape")
        return found + [pool._received(one).out_of_memory for one in (other, failed, failed)]

    assert asyncio.run(scene()) == [False, False, True, False]


@pytest.mark.parametrize(("code", "named"), [(0, True), (1, False), (None, False)])
def test_programs_that_a_worker_has_left_running_are_named_if_it_ended_well(
    code: int | None, named: bool
) -> None:
    async def scene() -> list[str]:
        notes: list[str] = []
        pool, server = make_pool()
        pool.noted = notes.append
        pool.assign(ASSIGN, None)
        ended = fork_protocol.ProcessEnded(
            worker=1, code=code, signal=9 if code is None else None, killed=("sh -c cp", "b")
        )
        fork_protocol.send(server, ended)
        while pool._processes:
            await asyncio.sleep(0)
        server.close()
        return notes

    text = "rank 0 has ended, with its background processes: `sh -c cp` and 1 more"
    assert asyncio.run(scene()) == ([text] if named else [])
