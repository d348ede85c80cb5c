"""Where agents and the command line dial in: an asyncio server of length-prefixed msgpack frames.

Owns: connections, who may speak (TLS, token, version, job), and one link per node of every job that
is registered. Must not: decide what a message means; it hands agents' messages and requests on.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from .. import limits
from ..errors import HoldfastError, Problem, UserError
from ..protocol import messages as wire
from ..protocol.facts import NodeFacts
from ..protocol.tls import choosing_context

GREETING_TIMEOUT_S = 10.0
"""A connection that has not said who it is by then is closed."""


class Sink(Protocol):
    """Who gets what arrives. Called from the event loop; must not block."""

    def refusal(self, hello: wire.Hello) -> str:
        """Why this node may not join; empty when it may."""

    def joined(self, link: AgentConnection, hello: wire.Hello) -> None:
        """A node said Hello; its Welcome has been sent."""

    def received(self, node: str, message: wire.Message) -> None:
        """A node said anything else."""

    def disconnected(self, node: str) -> None:
        """The node's link closed and no newer one has replaced it."""

    def replaced(self, node: str) -> None:
        """The node dialled in again while its old link was still open."""


Handler = Callable[["ReplyStream", wire.Request], Awaitable[None]]


class AgentConnection:
    """A node that may be spoken to."""

    def __init__(self, node: str, facts: NodeFacts, peer: Connection) -> None:
        self.node, self.facts = node, facts
        self._peer = peer

    def send(self, message: wire.Message) -> None:
        """Queue a message; messages arrive in order or the link closes."""
        self._peer.send(message)

    def close(self) -> None:
        self._peer.close()


class ReplyStream:
    """The answering side of one request."""

    def __init__(self, peer: Connection) -> None:
        self._peer = peer

    @property
    def closed(self) -> bool:
        return self._peer.closed

    def reply(self, reply: wire.Reply) -> None:
        self._peer.send(reply)


@dataclass(eq=False)
class JobRoute:
    """A job that is spoken for here, and its connections."""

    job: str
    token: bytes
    welcome: Callable[[], wire.Welcome]
    links: dict[str, AgentConnection]
    sink: Sink
    handler: Handler
    tls_name: str
    context: ssl.SSLContext | None
    peers: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class AgentServer:
    """The server: one port, however many jobs.

    Without TLS (one job of this machine, on loopback) whoever dials in names its job in the first
    message. With TLS it has named it in the handshake before (SNI) and has proved that it holds
    that job's key; the first message must name the same one.
    """

    def __init__(self) -> None:
        self.port = 0
        self.address = ""
        self._guests: dict[str, JobRoute] = {}
        self._by_tls_name: dict[str, JobRoute] = {}
        self._strangers: set[Connection] = set()
        """Connections that have not said yet who they are."""
        self._server: asyncio.Server | None = None
        self._closed = False

    async def open(self, address: str = "127.0.0.1", port: int = 0, *, tls: bool = False) -> None:
        """Listen; with `tls`, only to those who hold the key of a registered job. Raises UserError
        when the port cannot be had."""
        loop = asyncio.get_running_loop()
        context = choosing_context(self._context) if tls else None
        try:
            self._server = await loop.create_server(
                lambda: Connection(self),
                address,
                port,
                ssl=context,
                ssl_handshake_timeout=GREETING_TIMEOUT_S if tls else None,
                backlog=4096,
            )
        except OSError as error:
            raise cannot_listen("the agents' port", address, port, error) from None
        self.address, self.port = self._server.sockets[0].getsockname()[:2]

    def register(
        self,
        job: str,
        *,
        token: str,
        welcome: Callable[[], wire.Welcome],
        links: dict[str, AgentConnection],
        sink: Sink,
        handler: Handler,
        tls_name: str = "",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Let the agents of a job in from now on. `links` is kept up to date: its nodes that are
        connected. `tls_name` and `context` (protocol.tls.server_context) where TLS is spoken."""
        assert job not in self._guests, f"{job} is registered twice"
        assert bool(tls_name) == (context is not None), "a context and the name that picks it"
        guest = JobRoute(job, token.encode(), welcome, links, sink, handler, tls_name, context)
        self._guests[job] = guest
        if tls_name:
            self._by_tls_name[tls_name] = guest

    def unregister(self, job: str) -> None:
        """Close all connections of a job and let nobody of it in any more. What was sent before
        still goes out. An unknown job is unregistered already."""
        guest = self._guests.pop(job, None)
        if guest is None:
            return
        if self._by_tls_name.get(guest.tls_name) is guest:
            del self._by_tls_name[guest.tls_name]
        for task in guest.tasks:
            task.cancel()
        guest.links.clear()
        for peer in list(guest.peers):
            peer.close()

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for job in list(self._guests):
            self.unregister(job)
        for peer in list(self._strangers):
            peer.close()
        if self._server is not None:
            await self._server.wait_closed()

    def _context(self, tls_name: str) -> ssl.SSLContext | None:
        guest = self._by_tls_name.get(tls_name)
        return guest.context if guest is not None else None

    # -- called by peers -----------------------------------------------------------------------
    def opened(self, peer: Connection) -> None:
        if self._closed:  # accepted just before: nobody would ever answer it
            peer.close()
        else:
            self._strangers.add(peer)

    def lost(self, peer: Connection) -> None:
        self._strangers.discard(peer)
        guest, link = peer.guest, peer.link
        if guest is None:
            return
        guest.peers.discard(peer)
        if link is not None and guest.links.get(link.node) is link:
            del guest.links[link.node]
            guest.sink.disconnected(link.node)

    def greeted(self, peer: Connection, message: wire.AnyMessage) -> None:
        """The first message of a connection."""
        if isinstance(message, wire.Hello):
            self._hello(peer, message)
        elif isinstance(message, wire.Request):
            self._request(peer, message)
        else:
            peer.close()

    def _admit(self, peer: Connection, guest: JobRoute) -> None:
        self._strangers.discard(peer)
        peer.guest = guest
        guest.peers.add(peer)

    def _hello(self, peer: Connection, hello: wire.Hello) -> None:
        guest = self._guest(peer, hello.job)
        refusal = self._refusal(guest, hello.version, hello.token, hello.job)
        if guest is not None and not refusal:
            refusal = guest.sink.refusal(hello)
        if guest is None or refusal:
            # A job that is not known here may be so soon: its controller may just be on its way.
            peer.send(wire.Refused(detail=refusal, final=guest is not None))
            peer.close()
            return
        self._admit(peer, guest)
        old = guest.links.get(hello.node)
        peer.link = guest.links[hello.node] = AgentConnection(hello.node, hello.facts, peer)
        if old is not None:
            old.close()
            guest.sink.replaced(hello.node)
        peer.send(guest.welcome())
        guest.sink.joined(peer.link, hello)

    def _request(self, peer: Connection, request: wire.Request) -> None:
        guest = self._guest(peer, request.job)
        refusal = self._refusal(guest, request.version, request.token, request.job)
        if guest is None or refusal:
            peer.send(wire.Reply(ok=False, detail=refusal))
            peer.close()
            return
        self._admit(peer, guest)
        task = asyncio.get_running_loop().create_task(self._answer(guest, peer, request))
        guest.tasks.add(task)
        task.add_done_callback(guest.tasks.discard)

    async def _answer(self, guest: JobRoute, peer: Connection, request: wire.Request) -> None:
        try:
            await guest.handler(ReplyStream(peer), request)
        except HoldfastError as error:
            peer.send(wire.Reply(ok=False, detail=str(error)))
        finally:
            peer.close()

    def _guest(self, peer: Connection, job: str) -> JobRoute | None:
        """The job that a connection is for. Who names none means the only one there is."""
        if not job and len(self._guests) == 1:
            job = next(iter(self._guests))
        guest = self._guests.get(job)
        if guest is not None and guest.context is not peer.context:
            return None  # the key of one job does not open another
        return guest

    def _refusal(self, guest: JobRoute | None, version: int, token: str, job: str) -> str:
        if version != limits.PROTOCOL_VERSION:
            return (
                f"protocol version: got {version}; expected {limits.PROTOCOL_VERSION}; use the "
                f"same Holdfast on both sides"
            )
        if guest is None:
            # Strangers do not learn which jobs there are.
            return f"job: got {job or 'none'}; this is not its controller, or not yet"
        # Every comparison takes the same time, so that a token cannot be guessed byte by byte.
        if not hmac.compare_digest(token.encode(), guest.token):
            return "token: not the one of this job"
        return ""


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, endpoint: AgentServer) -> None:
        self._endpoint = endpoint
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self.closed = False
        self.guest: JobRoute | None = None
        self.link: AgentConnection | None = None
        self.context: ssl.SSLContext | None = None
        """The job's, as the client has named it in the handshake; None: no TLS."""
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """With TLS: after the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("ssl_object")
        self.context = connection.context if connection is not None else None
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(GREETING_TIMEOUT_S, self.close)
        self._endpoint.opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for message in self._messages():
                self._receive(message)
        except wire.BadFrame:
            # It does not speak our protocol, so there is nothing to say to it either.
            self.close()

    def _messages(self) -> list[wire.AnyMessage]:
        at, found, size = 0, [], len(self._buffer)
        while size - at >= 4:
            end = at + 4 + wire.frame_length(bytes(self._buffer[at : at + 4]))
            if end > size:
                break
            found.append(wire.decode(bytes(self._buffer[at + 4 : end])))
            at = end
        del self._buffer[:at]
        return found

    def _receive(self, message: wire.AnyMessage) -> None:
        if self.closed:
            return
        if not self._greeted:
            self._greeted = True
            self._patience_ends()
            self._endpoint.greeted(self, message)
        elif self.guest and self.link and isinstance(message, wire.FromAgent):
            self.guest.sink.received(self.link.node, message)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._patience_ends()
        self._endpoint.lost(self)

    def _patience_ends(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()

    def send(self, message: wire.Message) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(wire.encode(message))

    def close(self) -> None:
        """Close after what was sent has gone out."""
        if self._transport is not None and not self.closed:
            self.closed = True
            self._transport.close()


def cannot_listen(field: str, address: str, port: int, error: OSError) -> UserError:
    """Why a server could not be opened, with the fix."""
    if error.errno == errno.EADDRINUSE:
        fix = "choose another, or 0 for any free one; `ss -ltnp` shows who has it"
        return UserError(str(Problem(field, f"{port}, which is in use", "a free port", fix)))
    why = error.strerror or str(error)
    place = f"{address}:{port} ({why})"
    return UserError(str(Problem(field, place, "an address of this machine and a free port")))
