"""Process groups that are cut and formed again, in two real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.pool.failures import is_secondary
from holdfast.workers.session import distributed, groups
from holdfast.workers.session.distributed import rank_env
from holdfast.workers.session.groups import Groups, NotKept, SwitchStore
from tests.unit.workers.members import membership

pytestmark = pytest.mark.skipif(bool(groups.why_not_formed()), reason=groups.why_not_formed())


def opened(at: socket.socket, rank: int) -> Store:
    fd = os.dup(at.fileno()) if rank == 0 else None
    return TCPStore(*at.getsockname(), None, not rank, wait_for_workers=False, master_listen_fd=fd)


def in_two_processes(work: Callable[[int, list[Callable[[], Store]]], None]) -> None:
    """Each gets its rank and a way to open each of two stores, which rank 0 hosts."""
    listeners, pids = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)], []
    read, write = os.pipe()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read if rank else write)
                stores = [cache(partial(opened, one, rank)) for one in listeners]
                work(rank, stores)
                if rank == 0:
                    os.read(read, 1)  # it hosts the stores until the other one has ended
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    os.close(write)
    ends = {os.pidfd_open(pid): pid for pid in pids}
    first = ends[select.select(ends, [], [])[0][0]]
    (other,) = set(pids) - {first}
    if status := os.waitpid(first, 0)[1]:
        os.kill(other, signal.SIGKILL)  # it would wait for its peer
    assert (status, os.waitpid(other, 0)[1]) == (0, 0)
    for one in (read, *ends, *(listener.detach() for listener in listeners)):
        os.close(one)


def total(rank: int) -> float:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return float(value)


def joined(
    rank: int, store: Store, *, connected: bool, replicas: int = 1
) -> tuple[Groups, SwitchStore]:
    torch.set_num_threads(1)
    switch, size = SwitchStore(store), max(2, replicas)
    made = Groups(switch, rank, size, 1, connected=connected, replicas=replicas)
    dist.init_process_group("gloo", store=switch, rank=rank, world_size=size)
    return made, switch


def test_a_collective_that_waits_is_cut_and_the_group_is_formed_again() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, switch = joined(rank, stores[0](), connected=True)
        assert total(rank) == 3
        dist.destroy_process_group()  # a script may make its own
        dist.init_process_group("gloo", store=switch, rank=rank, world_size=2)
        group = dist.new_group([0, 1])
        assert total(rank) == 3 and made.whole, "what a destroyed group had does not count"
        if rank == 0:
            threading.Timer(0.2, made.cut).start()
            with pytest.raises(RuntimeError) as error:
                total(rank)
            assert is_secondary(error.value) and not made.whole
        made.connect(stores[1](), rank, 2, 2, lambda: False)
        assert total(rank) == 3 and group.size() == 2 and made.whole
        dist.barrier(group)

    in_two_processes(work)


MEMBERSHIP = membership(mesh=Mesh(2, 1), workers_per_node=2)


def test_a_world_of_a_scripts_own_size_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, distributed.BEFORE_SESSION, sys)

    def work(rank: int, _: list[Callable[[], Store]]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = port
        distributed.keep_groups_of_script(MEMBERSHIP)
        dist.init_process_group("gloo")
        assert total(0) == 1 and not groups.of_script
        dist.destroy_process_group()

    in_two_processes(work)


def test_a_split_group_is_connected_and_formed_again() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=True)
        part = dist.split_group(None, [[0, 1]])
        dist.barrier(part)
        assert not made.foreign
        made.connect(stores[1](), rank, 2, 2, lambda: False)
        dist.barrier(part)

    in_two_processes(work)


def test_groups_that_a_framework_makes_before_the_session_are_formed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, distributed.BEFORE_SESSION, sys)

    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        torch.set_num_threads(1)
        os.environ["RANK"] = str(rank)
        distributed.own_store = lambda *_, **__: stores[0]()  # type: ignore[assignment]
        distributed.keep_groups_of_script(MEMBERSHIP)
        for _ in range(2):  # a script may make them once more
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("gloo", rank=rank, world_size=2)
            assert total(rank) == 3 and not groups.why_not_formed()
        join = partial(distributed.join, rank_env(), torch.device("cpu"), MEMBERSHIP)
        made = join(keeps=True)
        assert made is not None and join(keeps=True) is None
        made.connect(stores[1](), rank, 2, 2, lambda: False)
        assert total(rank) == 3

    in_two_processes(work)


def test_new_reducers_broadcast_buffers_whatever_the_last_forward_was() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=True)
        model = DistributedDataParallel(module=torch.nn.BatchNorm1d(2))
        model.require_forward_param_sync = rank == 0  # rank 1 was in a micro-batch before the last
        made.reset()
        model.module.running_mean.fill_(rank)
        model(torch.zeros(2, 2))
        assert model.module.running_mean.tolist() == [0, 0]

    in_two_processes(work)


def test_a_rank_with_more_groups_than_its_peers_does_not_connect() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=False)
        with pytest.raises(RuntimeError, match="has not been initialized"):
            total(rank)
        if rank == 0:
            made.connect(stores[1](), rank, 2, 2, lambda: False)
            return
        dist.new_group([0, 1])
        with pytest.raises(NotKept, match="has the process group"):
            made.connect(stores[1](), rank, 2, 2, lambda: False)

    in_two_processes(work)


def test_a_survivor_of_another_replica_never_meets_the_new_group_of_the_same_name() -> None:
    """Rank 1 of two trains alone as rank 0, and a new process gets its old rank."""

    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(1, stores[0](), connected=False, replicas=2)
        replica = dist.new_group([1], use_local_synchronization=True)
        if rank == 0:
            made.connect(stores[0](), 0, 1, 2, lambda: False)
        made.connect(stores[1](), rank, 2, 3, lambda: False)
        own = torch.tensor([float(rank)])
        dist.all_reduce(own, group=replica)
        assert (total(rank), own.item()) == (3, rank)

    in_two_processes(work)


def test_an_older_torch_imports_it_and_the_reason_says_what_it_lacks() -> None:
    lines = "from torch._C import _distributed_c10d as native; del native.ReconfigureOptions"
    asks = "from holdfast.workers.session import groups; print(groups.why_not_formed())"
    command = [sys.executable, "-c", f"import torch.distributed; {lines}; {asks}"]
    done = subprocess.run(command, timeout=200, capture_output=True, text=True, check=True)
    assert done.stdout == "this torch cannot form process groups again (2.15 can)\n"


def test_groups_pretend_collectives_without_peers_and_connect_afterwards() -> None:
    def work(rank: int, stores: list[Callable[[], Store]]) -> None:
        made, _ = joined(rank, stores[0](), connected=False)
        made.pretend(alone=True)
        both = dist.new_group([0, 1])
        for group in (None, both):
            own = torch.tensor([rank + 1])
            dist.all_reduce(own, group=group)
            assert own.item() == rank + 1, "nothing was sent"
        made.pretend(alone=False)
        with pytest.raises(RuntimeError, match="has not been initialized"):
            total(rank)
        made.connect(stores[1](), rank, 2, 2, lambda: False)
        for group in (None, both):
            own = torch.tensor([rank + 1])
            dist.all_reduce(own, group=group)
            assert own.item() == 3

    in_two_processes(work)


WORLD, WITHIN, OVER = [0, 1, 2, 3], [2, 3], [1, 3]


@pytest.mark.parametrize(
    ("made", "rank", "now", "expected"),
    [
        (WORLD, 3, (3, 2), WORLD),  # as before
        (WORLD, 3, (1, 1), [0, 1]), (WITHIN, 3, (1, 1), [0, 1]), (OVER, 3, (1, 1), [1]),  # shrunk
        (WORLD, 3, (1, 2), WORLD), (WITHIN, 3, (1, 2), [0, 1]), (OVER, 3, (1, 2), OVER),  # and back
        (WORLD, 3, (3, 3), [0, 1, 2, 3, 4, 5]), (OVER, 3, (3, 3), [1, 3, 5]),  # grown
        ([1, 2], 1, (1, 2), [1, 2]), ([1, 2], 1, (1, 3), None), ([3, 1], 3, (3, 3), None),
        ([3, 2], 3, (3, 3), [3, 2]),
    ],
)  # fmt: skip
def test_a_group_follows_its_replica_or_covers_all_replicas(
    made: list[int], rank: int, now: tuple[int, int], expected: list[int] | None
) -> None:
    """Two replicas of two ranks were made."""
    if expected is None:
        with pytest.raises(NotKept, match="neither within a replica nor over all"):
            groups.ranks_now(made, 2, (rank, 2), now)
        return
    assert groups.ranks_now(made, 2, (rank, 2), now) == expected


def test_a_group_of_a_single_replica_follows_no_growth() -> None:
    assert groups.ranks_now([0, 1], 2, (1, 1), (1, 1)) == [0, 1]
    with pytest.raises(NotKept):
        groups.ranks_now([0, 1], 2, (1, 1), (1, 2))
