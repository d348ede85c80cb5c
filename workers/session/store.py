"""The store at which the ranks of a generation meet: rank 0 hosts a new one in every generation."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.fabric import is_loopback

TIMEOUT = timedelta(seconds=limits.STARTUP_TIMEOUT_S)
"""A last resort: the controller finds hangs much earlier, and kills the processes."""

CONNECT_TIMEOUT_S = 3.0
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 1.0
ATTEMPTS_PER_S = 20_000
"""Attempts of all ranks together."""
SHARE_OF_WAIT = 1 / 32
"""A pause is at most this share of the wait before it: a small job finds the store at once, and a
long wait costs few attempts."""
LOOPBACK = "127.0.0.1"


def open_store(rank: int, world_size: int, address: str, port: int, *, one_machine: bool) -> Store:
    """Hosts the store on rank 0, connects to it on others. With `one_machine` no other machine can
    connect.

    As env:// does, without waiting until all ranks are connected: the handshake of the group waits
    for them anyway, and every round trip delays a recovery."""
    local = one_machine or is_loopback(address)
    if local and (address == "localhost" or not is_loopback(address)):
        address = LOOPBACK
    if rank != 0:
        wait_until_open(address, port, world_size)
        return _store(address, port, world_size)
    listener = _listen(address, port) if local else None
    if listener is None:
        return _store(address, port, world_size, is_master=True)
    return _store(address, port, world_size, is_master=True, master_listen_fd=listener.detach())


def _store(address: str, port: int, world_size: int, **more: object) -> Store:
    return TCPStore(
        address,
        port,
        world_size,
        timeout=TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        **more,  # type: ignore[arg-type]
    )


def _listen(address: str, port: int) -> socket.socket | None:
    """None where this process hosts a store there already, which torch shares."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # With SO_REUSEADDR: the agent reserves the port with a socket that does not listen.
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def wait_until_open(address: str, port: int, world_size: int) -> None:
    """Returns when the store listens. TCPStore would wait too, but after a first attempt that is a
    millisecond too early it pauses for 0.3 to 0.7 s, and the ranks of a recovery start together."""
    deadline = time.monotonic() + limits.STARTUP_TIMEOUT_S
    for pause_s in pauses(world_size):
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError:
            if time.monotonic() >= deadline:
                return  # TCPStore raises the error
            time.sleep(pause_s)
        else:
            return


def pauses(
    world_size: int, uniform: Callable[[float, float], float] = random.uniform
) -> Iterator[float]:
    """Seconds between a rank's attempts to connect. They differ between ranks, so that thousands do
    not connect at once."""
    shortest = max(FIRST_PAUSE_S, world_size / ATTEMPTS_PER_S)
    longest, waited_s = max(LONGEST_PAUSE_S, shortest), 0.0
    while True:
        pause_s = min(max(shortest, waited_s * SHARE_OF_WAIT), longest) * uniform(0.75, 1.25)
        yield pause_s
        waited_s += pause_s
