"""Where agents and the command line dial in: an asyncio server of length-prefixed msgpack frames.

Owns: connections, who may speak (token, version, job), and one link per node. Must not: decide what
a message means; it hands agents' messages and requests on.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..protocol import limits
from ..protocol import messages as wire
from ..protocol.errors import HoldfastError, Problem, UserError
from ..protocol.facts import NodeFacts

GREETING_TIMEOUT_S = 10.0
"""A connection that has not said who it is by then is closed."""


class Sink(Protocol):
    """Who gets what arrives. Called from the event loop; must not block."""

    def refusal(self, hello: wire.Hello) -> str:
        """Why this node may not join; empty when it may."""

    def joined(self, link: AgentLink, hello: wire.Hello) -> None:
        """A node said Hello; its Welcome has been sent."""

    def received(self, node: str, message: wire.Message) -> None:
        """A node said anything else."""

    def disconnected(self, node: str) -> None:
        """The node's link closed and no newer one has replaced it."""

    def replaced(self, node: str) -> None:
        """The node dialled in again while its old link was still open."""


Handler = Callable[["Stream", wire.Request], Awaitable[None]]


class AgentLink:
    """A node that may be spoken to."""

    def __init__(self, node: str, facts: NodeFacts, peer: Peer) -> None:
        self.node, self.facts = node, facts
        self._peer = peer

    def send(self, message: wire.Message) -> None:
        """Queue a message; messages arrive in order or the link closes."""
        self._peer.send(message)

    def close(self) -> None:
        self._peer.close()


class Stream:
    """The answering side of one request."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def closed(self) -> bool:
        return self._peer.closed

    def reply(self, reply: wire.Reply) -> None:
        self._peer.send(reply)


class Endpoint:
    """The server."""

    def __init__(
        self,
        *,
        job_name: str,
        token: str,
        welcome: wire.Welcome,
        links: dict[str, AgentLink],
        sink: Sink,
        handler: Handler,
    ) -> None:
        """`links` is kept up to date: the nodes that are connected."""
        self._job_name, self._token = job_name, token.encode()
        self._welcome, self.sink, self._handler = welcome, sink, handler
        self.links = links
        self.port = 0
        self.address = ""
        self._peers: set[Peer] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(
        self, address: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None
    ) -> None:
        """Listen; TLS with `context`. Raises UserError when the port cannot be had."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Peer(self), address, port, ssl=context, backlog=4096
            )
        except OSError as error:
            raise cannot_listen("the agents' port", address, port, error) from None
        self.address, self.port = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self.links.clear()
        for peer in list(self._peers):
            peer.close()
        if self._server is not None:
            await self._server.wait_closed()

    # -- called by peers -----------------------------------------------------------------------
    def opened(self, peer: Peer) -> None:
        if self._closed:  # accepted just before: nobody would ever answer it
            peer.close()
        else:
            self._peers.add(peer)

    def lost(self, peer: Peer) -> None:
        self._peers.discard(peer)
        link = peer.link
        if link is not None and self.links.get(link.node) is link:
            del self.links[link.node]
            self.sink.disconnected(link.node)

    def greeted(self, peer: Peer, message: wire.AnyMessage) -> None:
        """The first message of a connection."""
        if isinstance(message, wire.Hello):
            self._hello(peer, message)
        elif isinstance(message, wire.Request):
            self._request(peer, message)
        else:
            peer.close()

    def _hello(self, peer: Peer, hello: wire.Hello) -> None:
        refusal = self._refusal(hello.version, hello.token)
        if not refusal and hello.job != self._job_name:
            refusal = f"job: got {hello.job}; this is the controller of {self._job_name}"
        refusal = refusal or self.sink.refusal(hello)
        if refusal:
            peer.send(wire.Refused(detail=refusal, final=True))
            peer.close()
            return
        old = self.links.get(hello.node)
        peer.link = self.links[hello.node] = AgentLink(hello.node, hello.facts, peer)
        if old is not None:
            old.close()
            self.sink.replaced(hello.node)
        peer.send(self._welcome)
        self.sink.joined(peer.link, hello)

    def _request(self, peer: Peer, request: wire.Request) -> None:
        if refusal := self._refusal(request.version, request.token):
            peer.send(wire.Reply(ok=False, detail=refusal))
            peer.close()
            return
        task = asyncio.get_running_loop().create_task(self._answer(peer, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: Peer, request: wire.Request) -> None:
        try:
            await self._handler(Stream(peer), request)
        except HoldfastError as error:
            peer.send(wire.Reply(ok=False, detail=str(error)))
        finally:
            peer.close()

    def _refusal(self, version: int, token: str) -> str:
        if version != limits.PROTOCOL_VERSION:
            return (
                f"protocol version: got {version}; expected {limits.PROTOCOL_VERSION}; use the "
                f"same Holdfast on both sides"
            )
        # Every comparison takes the same time, so that a token cannot be guessed byte by byte.
        if not hmac.compare_digest(token.encode(), self._token):
            return "token: not the one of this job"
        return ""


class Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self.closed = False
        self.link: AgentLink | None = None
        self._timeout = asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self.close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
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
            self._timeout.cancel()
            self._endpoint.greeted(self, message)
        elif self.link is not None and isinstance(message, wire.FromAgent):
            self._endpoint.sink.received(self.link.node, message)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._timeout.cancel()
        self._endpoint.lost(self)

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
