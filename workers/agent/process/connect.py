"""Where a controller may be, and how one gets a connection to it.

Owns: reading the file of an endpoint, resolving names to all their addresses (IPv4 and
IPv6), trying them, TLS. Must not: try again later, or understand messages; link.py does.

With several operator replicas only the leader listens: the others refuse, which costs a round trip.
An address that does not answer at all (a lost machine) delays the next one by STAGGER_S only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.fabric import is_loopback
from holdfast.orchestrator.protocol.messages import Endpoint

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CONNECT_TIMEOUT_S = 5.0
"""All addresses together, name resolution and the TLS handshake included."""
RESOLVE_TIMEOUT_S = 2.0
"""Then the addresses that a name had before are used."""
RESOLVERS = 4
STAGGER_S = 0.25
"""RFC 8305: a second address is tried this long after a first one that says nothing."""


def endpoint_in(file: Path) -> Callable[[], tuple[Endpoint, ...]]:
    """Reads the file at every call: a new controller has a new port. Raises OSError, ValueError or
    KeyError while there is none."""

    def read() -> tuple[Endpoint, ...]:
        document = json.loads(file.read_text(encoding="utf-8"))
        return ((str(document["address"]), int(document["port"])),)

    return read


class Connector:
    """Connects to one of the endpoints that `where` names. `where` is asked each time and may raise
    OSError, ValueError or KeyError."""

    def __init__(
        self,
        where: Callable[[], tuple[Endpoint, ...]],
        context: ssl.SSLContext | None = None,
        server_name: str = "",
        *,
        resolve: Callable[[str, int], list[Endpoint]] | None = None,
    ) -> None:
        self._where, self._context, self._server_name = where, context, server_name
        self._resolve = resolve or addresses_of
        self._known: dict[Endpoint, list[Endpoint]] = {}
        """The last answer for each name: a cluster whose DNS is down has its operator still."""
        # Threads of its own: a resolver that does not answer would hold up whoever shares them.
        self._threads = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="holdfast-resolve")

    async def dial(self) -> Streams:
        """A connection to the first address that takes one, with TLS where there is a context.

        Raises OSError, naming every address and what was wrong with it, and what `where` raises.
        """
        endpoints = self._where()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                addresses = await self._addresses(endpoints)
                return await _race(addresses, self._context, self._server_name)
        except TimeoutError:
            names = ", ".join(f"{host}:{port}" for host, port in endpoints)
            raise OSError(f"{names}: no connection within {CONNECT_TIMEOUT_S:g} s") from None

    async def _addresses(self, endpoints: tuple[Endpoint, ...]) -> list[Endpoint]:
        """Every address of every name, in the order given. Raises OSError when no name has any."""
        loop = asyncio.get_running_loop()
        asked = {
            endpoint: loop.run_in_executor(self._threads, self._resolve, *endpoint)
            for endpoint in endpoints
        }
        await asyncio.wait(asked.values(), timeout=RESOLVE_TIMEOUT_S)
        found: dict[Endpoint, None] = {}
        problems = []
        for endpoint, answer in asked.items():
            problem = self._note(endpoint, answer)
            found.update(dict.fromkeys(self._known.get(endpoint, [])))
            problems += [f"{endpoint[0]}: {problem}"] if problem else []
        if not found:
            raise OSError("; ".join(problems))
        return list(found)

    def _note(self, endpoint: Endpoint, answer: asyncio.Future[list[Endpoint]]) -> str:
        """Take the answer over; what is wrong with it."""
        if not answer.done():
            answer.cancel()
            return f"its name was not resolved within {RESOLVE_TIMEOUT_S:g} s"
        error = answer.exception()
        if error is None:
            self._known[endpoint] = answer.result()
            return ""
        if not isinstance(error, OSError):
            raise error
        return _why(error)


def addresses_of(host: str, port: int) -> list[Endpoint]:
    """All addresses of a name, IPv4 and IPv6, as the system resolves it. Blocks; raises OSError."""
    answer = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(str(entry[4][0]), int(entry[4][1])) for entry in answer]


async def _race(
    addresses: list[Endpoint], context: ssl.SSLContext | None, server_name: str
) -> Streams:
    """The next address is tried when the ones before have failed, or say nothing."""
    problems: list[str] = []
    waiting = list(addresses)
    trying: dict[asyncio.Task[Streams], Endpoint] = {}
    try:
        while waiting or trying:
            if waiting:
                address = waiting.pop(0)
                task = asyncio.create_task(_attempt(address, context, server_name))
                trying[task] = address
            patience_s = STAGGER_S if waiting else None
            done, _ = await asyncio.wait(
                trying, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = trying.pop(task)
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                problems.append(f"{address[0]}: {_why(error)}")
    finally:
        for task in trying:
            task.cancel()
            task.add_done_callback(_close_late)
    raise OSError("; ".join(problems))


async def _attempt(address: Endpoint, context: ssl.SSLContext | None, server_name: str) -> Streams:
    host, port = address
    if context is None and not is_loopback(host):
        raise PermissionError(
            "not dialled: without TLS the job's token would go over the network in clear; "
            "give --tls and --tls-name"
        )
    if context is None:
        reader, writer = await asyncio.open_connection(host, port)
    else:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=server_name
        )
    own = writer.get_extra_info("socket")
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Heartbeats are always under way, so a controller whose machine lost power, which closes no
    # connection, is noticed by what it does not acknowledge.
    patience_ms = int(limits.LINK_TIMEOUT_S * 1000)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    return reader, writer


def _close_late(task: asyncio.Task[Streams]) -> None:
    """An attempt that was through just before it was cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        if task.exception() is None:
            task.result()[1].close()


def _why(error: OSError) -> str:
    """asyncio's own text of a refused connection repeats the address instead of the reason."""
    if error.errno is None or isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)
