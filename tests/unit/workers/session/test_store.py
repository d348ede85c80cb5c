"""Address of rank 0's store, and the other ranks' attempts to connect."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from holdfast.workers.session import store


def attempts(world_size: int, seed: int, until_s: float) -> Iterator[float]:
    """Times at which one rank tries to connect; connecting takes no time."""

    def times() -> Iterator[float]:
        at = 0.0
        for pause_s in store.pauses(world_size, random.Random(seed).uniform):
            yield at
            at += pause_s

    return takewhile(lambda at: at < until_s, times())


def test_4096_ranks_do_not_flood_the_store() -> None:
    """A pause of 2 ms made it two million attempts a second, for as long as they waited."""
    per_second = Counter(
        int(at) for rank in range(1, 4096) for at in attempts(4096, rank, until_s=60.0)
    )
    assert max(per_second.values()) <= 25_000
    assert per_second[59] <= 6_000
    first = sorted(next(store.pauses(4096, random.Random(rank).uniform)) for rank in range(4096))
    assert first[-1] - first[0] > 0.09, "they do not come back in the same millisecond"


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_first_attempts_of_a_small_job_are_close_together(rank: int) -> None:
    times = list(attempts(4, rank, until_s=30.0))
    for before, after in pairwise(times):
        assert after - before <= max(0.0025, before / 25), f"at {before}"
    assert len([at for at in times if at < 0.1]) >= 35
    assert len(times) < 300


# -- real sockets -----------------------------------------------------------------------------
def reserved_port() -> tuple[socket.socket, int]:
    """A port as the agent reserves it: bound to all addresses, without a listener."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held, held.getsockname()[1]


def listens_on(port: int) -> set[str]:
    """Local addresses of the listeners on a port, as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, its_port = local.partition(":")
            if state == "0A" and int(its_port, 16) == port:
                found.add(address)
    return found


LOCAL, LOOPBACK = "127.0.0.1", "0100007F"


@pytest.mark.parametrize(
    ("address", "one_machine"),
    [
        pytest.param("127.0.0.1", False, id="loopback"),
        pytest.param("localhost", False, id="localhost"),
        pytest.param("192.0.2.1", True, id="one-machine-with-an-address"),
    ],
)
def test_the_store_of_a_job_of_one_machine_listens_on_loopback_only(
    address: str, one_machine: bool
) -> None:
    held, port = reserved_port()
    with held:
        host = store.open_store(0, 2, address, port, one_machine=one_machine)
        assert listens_on(port) == {LOOPBACK}
        host.set("key", "value")
        peer = store.open_store(1, 2, address, port, one_machine=one_machine)
        assert peer.get("key") == b"value"


def test_the_store_of_several_machines_listens_on_all_addresses() -> None:
    held, port = reserved_port()
    with held:
        host = store.open_store(0, 1, "0.0.0.0", port, one_machine=False)
        assert listens_on(port) - {LOOPBACK}
        del host


def test_a_second_store_of_a_process_shares_the_first_ones_port() -> None:
    held, port = reserved_port()
    with held:
        first, second = (store.open_store(0, 1, LOCAL, port, one_machine=True) for _ in range(2))
        first.set("key", "value")
        assert second.get("key") == b"value" and listens_on(port) == {LOOPBACK}


def test_a_port_that_another_process_has_taken_is_not_opened_to_other_machines() -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        with pytest.raises(RuntimeError, match="in use"):
            store.open_store(0, 1, LOCAL, taken.getsockname()[1], one_machine=True)
        assert listens_on(taken.getsockname()[1]) == {LOOPBACK}


def test_a_rank_that_comes_first_waits_for_the_store() -> None:
    held, port = reserved_port()
    found = []

    def second() -> None:
        peer = store.open_store(1, 2, "127.0.0.1", port, one_machine=True)
        found.append(peer.get("key"))

    with held:
        waiting = threading.Thread(target=second)
        waiting.start()
        host = store.open_store(0, 2, "127.0.0.1", port, one_machine=True)
        host.set("key", "value")
        waiting.join(60)
    assert found == [b"value"]
