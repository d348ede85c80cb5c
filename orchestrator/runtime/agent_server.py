"""The server that agents and the CLI connect to, with length-prefixed msgpack frames over TCP.

It authenticates connections (TLS, token, version, job), keeps one per node of every registered job,
and passes messages of agents and requests of the CLI on.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from holdfast.orchestrator.tasks import TaskSet

from .. import limits
from ..errors import HoldfastError, UserError, installation
from ..protocol import messages as wire
from ..protocol.facts import NodeFacts
from ..protocol.framing import FrameReader
from ..protocol.strangers import ConnectionLimit, listen
from ..protocol.tls import choosing_context


class AgentSink(Protocol):
    """Receives what the agents of one job send. Called from the event loop; must not block."""

    def refusal(self, hello: wire.Hello) -> str:
        """Reason why this node may not join; empty: it may. The node has shown the job's token;
        the sink compares the protocol."""

    def joined(self, link: AgentConnection, hello: wire.Hello) -> None:
        """A node has sent Hello and been sent its Welcome."""

    def received(self, node: str, message: wire.Message) -> None:
        """A node has sent any other message."""

    def disconnected(self, node: str) -> None:
        """The node's connection closed and no newer one has replaced it."""

    def replaced(self, node: str) -> None:
        """The node reconnected while its old connection was open."""


Handler = Callable[["Connection", wire.Request], Awaitable[None]]
"""Sends the replies to a request."""


class AgentConnection:
    """The connection of a node that has joined."""

    def __init__(self, node: str, facts: NodeFacts, connection: Connection) -> None:
        self.node, self.facts = node, facts
        self._connection = connection

    def send(self, message: wire.Message) -> None:
        """Queue a message; messages arrive in order or the connection closes."""
        self._connection.send(message)

    def close(self) -> None:
        self._connection.close()


@dataclass(eq=False)
class JobRoute:
    """A registered job and its connections."""

    job: str
    token: bytes
    welcome: Callable[[], wire.Welcome]
    links: dict[str, AgentConnection]
    sink: AgentSink
    handler: Handler
    tls_name: str
    context: ssl.SSLContext | None
    connections: set[Connection] = field(default_factory=set)
    tasks: TaskSet = field(default_factory=TaskSet)


class AgentServer:
    """One port for all jobs of a process.

    Without TLS (one job of this machine, on loopback) the first message of a connection names its
    job. With TLS the handshake has named the job before (SNI) and proved that the client holds its
    key; the first message must name the same job.
    """

    def __init__(self) -> None:
        self.port = 0
        self.address = ""
        self._routes: dict[str, JobRoute] = {}
        self._by_tls_name: dict[str, JobRoute] = {}
        self._unidentified: dict[Connection, int] = {}
        """Connections without a first message, and how many bytes of it have come."""
        self._strangers = ConnectionLimit()
        self._serving: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self, address: str = "127.0.0.1", port: int = 0, *, tls: bool = False) -> None:
        """Listen; with `tls`, only for clients that hold the key of a registered job. Raises
        UserError when the port cannot be opened."""
        context = choosing_context(self._context) if tls else None
        try:
            listener = listen(address, port)
        except OSError as error:
            raise cannot_listen("the agents' port", address, port, error) from None
        self.address, self.port = listener.getsockname()[:2]
        serving = self._strangers.serve(listener, partial(self._connect, context))
        self._serving = asyncio.get_running_loop().create_task(serving)

    async def _connect(self, context: ssl.SSLContext | None, sock: socket.socket) -> None:
        """Give a new connection its handshake."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Connection(self, sock), sock, ssl=context)

    def register(
        self,
        job: str,
        *,
        token: str,
        welcome: Callable[[], wire.Welcome],
        links: dict[str, AgentConnection],
        sink: AgentSink,
        handler: Handler,
        tls_name: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Accept the agents of a job from now on. `links` is kept up to date with the connected
        nodes. `tls_name` and `context` (protocol/tls.py): with TLS only."""
        assert job not in self._routes, f"{job} is registered twice"
        assert bool(tls_name) == (context is not None), "both or none"
        route = JobRoute(job, token.encode(), welcome, links, sink, handler, tls_name, context)
        self._routes[job] = route
        if tls_name:
            self._by_tls_name[tls_name] = route

    def unregister(self, job: str) -> None:
        """Close all connections of a job, after what was sent has gone out, and accept no more of
        them. An unknown job counts as unregistered."""
        route = self._routes.pop(job, None)
        if route is None:
            return
        if self._by_tls_name.get(route.tls_name) is route:
            del self._by_tls_name[route.tls_name]
        for task in route.tasks:
            task.cancel()
        route.links.clear()
        for connection in list(route.connections):
            connection.close()

    async def close(self) -> None:
        self._closed = True
        if self._serving is not None:
            self._serving.cancel()
        for job in list(self._routes):
            self.unregister(job)
        self._strangers.end_all()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    def _context(self, tls_name: str) -> ssl.SSLContext | None:
        route = self._by_tls_name.get(tls_name)
        return route.context if route is not None else None

    # -- called by connections -----------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        if self._closed:  # accepted just before the server was closed
            connection.close()
        else:
            self._unidentified[connection] = 0

    def received_part(self, connection: Connection, num_bytes: int) -> None:
        """A part of a first message has come; `num_bytes` of it wait for the rest."""
        if connection in self._unidentified:
            self._unidentified[connection] = num_bytes
            if sum(self._unidentified.values()) > limits.MAX_UNAUTHENTICATED_BYTES:
                connection.abort()

    def lost(self, connection: Connection) -> None:
        self._unidentified.pop(connection, None)
        self._strangers.leave(connection.sock)
        route, link = connection.route, connection.link
        if route is None:
            return
        route.connections.discard(connection)
        if link is not None and route.links.get(link.node) is link:
            del route.links[link.node]
            route.sink.disconnected(link.node)

    def greeted(self, connection: Connection, message: wire.AnyMessage) -> None:
        """The first message of a connection."""
        if isinstance(message, wire.Hello):
            self._hello(connection, message)
        elif isinstance(message, wire.Request):
            self._request(connection, message)
        else:
            connection.close()

    def _admit(self, connection: Connection, route: JobRoute) -> None:
        self._unidentified.pop(connection, None)
        self._strangers.leave(connection.sock)
        connection.admitted(route)
        route.connections.add(connection)

    def _hello(self, connection: Connection, hello: wire.Hello) -> None:
        route = self._route(connection, hello.job)
        refusal = self._refusal(route, hello)
        if route is not None and not refusal:
            refusal = route.sink.refusal(hello)
        if route is None or refusal:
            # The controller of an unknown job may still be starting, so that refusal is not final.
            connection.send(wire.Refused(detail=refusal, final=route is not None))
            connection.close()
            return
        self._admit(connection, route)
        old = route.links.get(hello.node)
        connection.link = route.links[hello.node] = AgentConnection(
            hello.node, hello.joined.facts, connection
        )
        if old is not None:
            old.close()
            route.sink.replaced(hello.node)
        connection.send(route.welcome())
        route.sink.joined(connection.link, hello)

    def _request(self, connection: Connection, request: wire.Request) -> None:
        route = self._route(connection, request.job)
        refusal = self._refusal(route, request) or other_protocol(request)
        if route is None or refusal:
            connection.send(wire.Reply(ok=False, detail=refusal))
            connection.close()
            return
        self._admit(connection, route)
        route.tasks.start(self._answer(route, connection, request))

    async def _answer(self, route: JobRoute, connection: Connection, request: wire.Request) -> None:
        try:
            await route.handler(connection, request)
        except HoldfastError as error:
            connection.send(wire.Reply(ok=False, detail=str(error)))
        finally:
            connection.close()

    def _route(self, connection: Connection, job: str) -> JobRoute | None:
        """The job of a connection; without a name, the only registered one."""
        if not job and len(self._routes) == 1:
            job = next(iter(self._routes))
        route = self._routes.get(job)
        if route is not None and route.context is not connection.context:
            return None  # the key of one job gives no access to another
        return route

    def _refusal(self, route: JobRoute | None, first: wire.Hello | wire.Request) -> str:
        if route is None:
            # The reply does not reveal which jobs are registered.
            return f"job: got {first.job or 'none'}; this is not its controller, or not yet"
        # In constant time, so that a token cannot be guessed byte by byte.
        if not hmac.compare_digest(first.token.encode(), route.token):
            return "token: not the one of this job"
        return ""


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: AgentServer, sock: socket.socket) -> None:
        self._server, self.sock = server, sock
        self._reader = FrameReader(limits.MAX_GREETING_BYTES)
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self.closed = False
        self.route: JobRoute | None = None
        self.link: AgentConnection | None = None
        self.context: ssl.SSLContext | None = None
        """Context of the job that the handshake named; None: no TLS."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called after the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        self.context = tls.context if tls is not None else None
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self._receive(wire.decode(body))
            if not self._greeted and not self.closed:
                self._server.received_part(self, self._reader.num_waiting)
        except wire.BadFrame:
            self.abort()  # a client of another protocol

    def admitted(self, route: JobRoute) -> None:
        """The peer has shown the token of this job."""
        self.route = route
        self._reader.max_bytes = limits.MAX_FRAME_BYTES

    def _receive(self, message: wire.AnyMessage) -> None:
        if self.closed:
            return
        if not self._greeted:
            self._greeted = True
            self._server.greeted(self, message)
        elif (
            self.route
            and self.link
            and isinstance(message, wire.FromAgent | wire.QuestionAnswer | wire.FetchCode)
        ):
            self.route.sink.received(self.link.node, message)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._server.lost(self)

    def send(self, message: wire.Message) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(wire.encode(message))

    def close(self) -> None:
        """Close after everything that was sent has gone out."""
        if self._transport is not None and not self.closed:
            self.closed = True
            self._transport.close()

    def abort(self) -> None:
        """Close at once, and forget what has been received."""
        if self._transport is not None and not self.closed:
            self.closed = True
            self._reader = FrameReader(limits.MAX_GREETING_BYTES)
            self._transport.abort()


def other_protocol(first: wire.Hello | wire.Request) -> str:
    """Reason to reject a message of another protocol; empty: the protocol is this one."""
    if first.version == limits.PROTOCOL_VERSION:
        return ""
    return (
        f"Holdfast: got {first.release} (protocol {first.version}); expected {limits.RELEASE} "
        f"(protocol {limits.PROTOCOL_VERSION}), which the controller has; on that node, run: "
        f"{installation('train')} {limits.RELEASE}; a pod needs the worker image of that release"
    )


def cannot_listen(field: str, address: str, port: int, error: OSError) -> UserError:
    """The error of a server that cannot listen, with the fix."""
    if error.errno == errno.EADDRINUSE:
        fix = "choose another, or 0 for any free one; `ss -ltnp` shows which process uses it"
        return UserError.of(field, f"{port}, which is in use", "a free port", fix)
    why = error.strerror or str(error)
    place = f"{address}:{port} ({why})"
    return UserError.of(field, place, "an address of this machine and a free port")
