"""Connects to the controller: reads its endpoints, resolves names (IPv4 and IPv6), races addresses.

With several operator replicas only the leader listens; the others refuse, which costs a round trip.
An address that does not answer (a lost machine) delays the next one by STAGGER_S only. Those of
asyncio.open_connection and aiohappyeyeballs know one name each and end with the TCP connection,
while a stuck controller may accept it and never finish the TLS handshake.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from asyncio.staggered import staggered_race
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol.fabric import is_loopback
from holdfast.orchestrator.protocol.messages import Endpoint

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

NUM_RESOLVERS = 4
RESOLVE_TIMEOUT_S = 2.0
"""Seconds after which the previous addresses of a name are used."""
STAGGER_S = 0.25
"""Time from the start of one attempt to the next (RFC 8305)."""


def endpoint_in(file: Path) -> Callable[[], tuple[Endpoint, ...]]:
    """Reads the file at every call: a new controller has a new port. Raises OSError, ValueError or
    KeyError while there is no valid file."""

    def read() -> tuple[Endpoint, ...]:
        document = json.loads(file.read_text(encoding="utf-8"))
        return ((str(document["address"]), int(document["port"])),)

    return read


class Connector:
    """Connects to one of the endpoints that `endpoints` returns, which is called each time and may
    raise OSError, ValueError or KeyError."""

    def __init__(
        self,
        endpoints: Callable[[], tuple[Endpoint, ...]],
        context: ssl.SSLContext | None = None,
        server_name: str = "",
        *,
        resolve: Callable[[str, int], list[Endpoint]] | None = None,
    ) -> None:
        self._endpoints, self._context, self._server_name = endpoints, context, server_name
        self._resolve = resolve or addresses_of
        self._resolved: dict[Endpoint, list[Endpoint]] = {}
        """Last addresses of each name: the operator stays reachable while DNS is down."""
        # Separate threads: a resolver that does not answer must not delay other work.
        self._threads = ThreadPoolExecutor(NUM_RESOLVERS, thread_name_prefix="holdfast-resolve")

    async def connect(self) -> Streams:
        """A connection to the first address that accepts one, with TLS if there is a context.

        Raises OSError with the error of every address, and what `endpoints` raises.
        """
        endpoints, limit_s = self._endpoints(), limits.CONNECT_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._race(await self._addresses(endpoints))
        except TimeoutError:
            names = ", ".join(f"{host}:{port}" for host, port in endpoints)
            raise OSError(f"{names}: no connection within {limit_s:g} s") from None

    async def _addresses(self, endpoints: tuple[Endpoint, ...]) -> list[Endpoint]:
        """All addresses of all names, in order. Raises OSError if there is none."""
        loop = asyncio.get_running_loop()
        lookups = {
            endpoint: loop.run_in_executor(self._threads, self._resolve, *endpoint)
            for endpoint in endpoints
        }
        await asyncio.wait(lookups.values(), timeout=RESOLVE_TIMEOUT_S)
        addresses: dict[Endpoint, None] = {}
        problems = []
        for endpoint, lookup in lookups.items():
            if not lookup.done():
                lookup.cancel()
                limit = f"{RESOLVE_TIMEOUT_S:g} s"
                problems.append(f"{endpoint[0]}: its name was not resolved within {limit}")
            elif isinstance(error := lookup.exception(), OSError):
                problems.append(f"{endpoint[0]}: {_text(error)}")
            else:
                self._resolved[endpoint] = lookup.result()
            addresses.update(dict.fromkeys(self._resolved.get(endpoint, [])))
        if not addresses:
            raise OSError("; ".join(problems))
        return list(addresses)

    async def _race(self, addresses: list[Endpoint]) -> Streams:
        """An attempt starts when the one before has failed, or after STAGGER_S."""
        attempts = [partial(self._attempt, *address) for address in addresses]
        streams: Streams | None
        streams, _, errors = await staggered_race(attempts, STAGGER_S)
        if streams is not None:
            return streams
        problems = []
        for (host, _port), error in zip(addresses, errors, strict=True):
            assert error is not None
            if not isinstance(error, OSError):
                raise error
            problems.append(f"{host}: {_text(error)}")
        raise OSError("; ".join(problems))

    async def _attempt(self, host: str, port: int) -> Streams:
        if self._context is None and not is_loopback(host):
            raise PermissionError(
                "no connection without TLS: the job's token would cross the network in clear; "
                "give --tls and --tls-name"
            )
        name = self._server_name if self._context is not None else None
        reader, writer = await asyncio.open_connection(
            host, port, ssl=self._context, server_hostname=name
        )
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A controller whose machine lost power closes no connection. Heartbeats are always being
        # sent, so missing acknowledgements reveal it.
        timeout_ms = int(limits.LINK_TIMEOUT_S * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        return reader, writer


def addresses_of(host: str, port: int) -> list[Endpoint]:
    """All addresses of a name, IPv4 and IPv6, from the system. Blocks; raises OSError."""
    answer = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(str(entry[4][0]), int(entry[4][1])) for entry in answer]


def _text(error: OSError) -> str:
    """The reason. asyncio's own text of a refused connection repeats the address instead."""
    if error.errno is None or isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)
