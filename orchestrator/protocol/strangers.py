"""Listening ports and strangers: connections that have not shown their right to a port.

Every process that reaches a port can connect, send nothing or a byte each second, and connect
again. A port therefore keeps a limited number of strangers, each for a limited time. A peer's
greeting takes milliseconds, so a new connection replaces the oldest one of the address with the
most, as soon as that one has had its time to greet.

Invariant: a stranger is ended by shutting its socket down. Its reader, a thread or an event loop,
sees its end and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from holdfast.orchestrator.tasks import TaskSet

from .. import limits

SWEEP_S = 0.5
"""Seconds between two looks for strangers whose time is up."""
SHORTAGE_PAUSE_S = 0.05
"""Pause after a connection that could not be accepted, mostly for want of a descriptor."""
PATIENCE_S = 0.5
"""Time that a stranger has for its greeting even where others wait: a port that is full accepts no
more until then. So a peer gets in behind any number that connect again at once."""
LOOK_S = 0.02
"""Pause before a full port looks again."""
BACKLOG = 4096
ACCEPTED_TOGETHER = 16
"""Connections that are accepted before a busy event loop does other work: one in each turn would
keep the agents of a large job waiting for minutes."""
MAX_THREADS = 64
"""Strangers of a server with a thread for each; also requests that it is answering."""


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.MAX_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def max_strangers() -> int:
    """Strangers that leave most of this process's descriptors for its work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft // 4, limits.MAX_STRANGERS) if soft > 0 else limits.MAX_STRANGERS


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on one address, or on all addresses of both families if `address` is empty. Raises
    OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    both = not address and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port),
        family=socket.AF_INET6 if both else family,
        backlog=BACKLOG,
        dualstack_ipv6=both,
    )


class ConnectionLimit:
    """The strangers of one port, limited in number and time. Usable by several threads."""

    def __init__(
        self,
        limit_s: float = limits.GREETING_TIMEOUT_S,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s`: the time of a whole greeting, handshake included."""
        self._limit_s, self._clock = limit_s, clock
        self._most = max_strangers() if most is None else most
        self._lock = threading.Lock()
        self._arrivals: dict[socket.socket, tuple[str, float]] = {}
        """Oldest first."""
        self._tasks = TaskSet()
        self._sweeping: asyncio.TimerHandle | None = None
        self._by_address: dict[str, dict[socket.socket, None]] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def enter(self, sock: socket.socket, address: str) -> None:
        """Add a connection; beyond the limit, end another one."""
        with self._lock:
            self._arrivals[sock] = (address, self._clock())
            self._by_address.setdefault(address, {})[sock] = None
            if len(self._arrivals) > self._most:
                self._end_one()

    def leave(self, sock: socket.socket) -> bool:
        """Forget a connection: it has authenticated or closed. False if its time was up."""
        with self._lock:
            return self._forget(sock)

    def end_all(self) -> None:
        with self._lock:
            for sock in list(self._arrivals):
                self._end(sock)

    def end_one(self) -> None:
        """Make room for another connection."""
        with self._lock:
            if self._arrivals:
                self._end_one()

    def must_wait(self) -> bool:
        """True if the port is full of strangers that have only just come."""
        with self._lock:
            if len(self._arrivals) < self._most:
                return False
            return self._clock() < self._arrivals[self._next_to_end()][1] + PATIENCE_S

    def end_overdue(self) -> None:
        """End the strangers whose time is up."""
        due = self._clock() - self._limit_s
        with self._lock:
            for sock in [sock for sock, (_, since) in self._arrivals.items() if since <= due]:
                self._end(sock)

    async def serve(
        self,
        listener: socket.socket,
        begin: Callable[[socket.socket], Awaitable[object]],
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Accept connections in the event loop until cancelled, whatever happens to one of them.

        `begin` may raise OSError; with `context` it gets a TLS socket before the handshake. The
        listener is closed at the end, connections are not.
        """
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._sweep(loop)
        try:
            for number in itertools.count():
                while self.must_wait():
                    await asyncio.sleep(LOOK_S)
                try:
                    sock, source = await loop.sock_accept(listener)
                except OSError:
                    self.end_one()
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
                    continue
                self._tasks.start(self._begin(sock, str(source[0]), begin, context))
                if number % ACCEPTED_TOGETHER == 0:
                    await asyncio.sleep(0)  # sock_accept does not yield while connections wait
        finally:
            listener.close()
            if self._sweeping is not None:
                self._sweeping.cancel()

    async def _begin(
        self,
        sock: socket.socket,
        address: str,
        begin: Callable[[socket.socket], Awaitable[object]],
        context: ssl.SSLContext | None,
    ) -> None:
        try:
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self.enter(sock, address)
            await begin(sock)
        except OSError:
            self.leave(sock)
            sock.close()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.end_overdue()
        self._sweeping = loop.call_later(SWEEP_S, self._sweep, loop)

    def _end_one(self) -> None:
        self._end(self._next_to_end())

    def _next_to_end(self) -> socket.socket:
        crowd = max(self._by_address.values(), key=len)
        return next(iter(crowd))

    def _end(self, sock: socket.socket) -> None:
        self._forget(sock)
        with contextlib.suppress(OSError):  # it is closed
            # The method of an SSLSocket would turn it into a socket without TLS for its reader.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _forget(self, sock: socket.socket) -> bool:
        address, _ = self._arrivals.pop(sock, ("", 0.0))
        crowd = self._by_address.get(address)
        if crowd is None:
            return False
        del crowd[sock]
        if not crowd:
            del self._by_address[address]
        return True


class GuardedHttpServer(socketserver.ThreadingTCPServer):
    """An HTTP server with a thread for each connection, which carries one request. A connection is
    a stranger until its request has arrived; then its answer has the same time."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[GuardedRequest],
        limit_s: float = limits.GREETING_TIMEOUT_S,
    ) -> None:
        """Raises OSError."""
        self._strangers = ConnectionLimit(limit_s, MAX_THREADS)
        self._answering = ConnectionLimit(limit_s, MAX_THREADS)
        super().__init__(address, handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def serve_in_thread(self, name: str) -> None:
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        while self._strangers.must_wait():
            time.sleep(LOOK_S)
        try:
            return super().get_request()
        except OSError:
            self._strangers.end_one()
            time.sleep(SHORTAGE_PAUSE_S)
            raise  # the server goes on

    def process_request(self, request: Any, client_address: Any) -> None:
        self._strangers.enter(request, str(client_address[0]))
        super().process_request(request, client_address)

    def arrived(self, request: socket.socket, address: str) -> bool:
        """A request has arrived. False if its time was up."""
        in_time = self._strangers.leave(request)
        if in_time:
            self._answering.enter(request, address)
        return in_time

    def shutdown_request(self, request: Any) -> None:
        self._strangers.leave(request)
        self._answering.leave(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        self._strangers.end_overdue()
        self._answering.end_overdue()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone, or was ended here
            super().handle_error(request, client_address)


class GuardedRequest(BaseHTTPRequestHandler):
    """A request to a GuardedHttpServer; subclasses define the methods, and the first reads no body
    of a client without authentication."""

    server: GuardedHttpServer

    def parse_request(self) -> bool:
        return super().parse_request() and self.server.arrived(
            self.connection, str(self.client_address[0])
        )

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
