"""Connecting to a controller: the address that listens, with the right key only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol import tls
from holdfast.orchestrator.protocol.messages import Endpoint, parse_endpoints
from holdfast.workers.agent.process.connect import Connector, endpoint_in
from holdfast.workers.agent.process.controller_link import ControllerLink
from tests.unit.runtime.certificates import make

NAME = "job.jobs.holdfast.dev"
pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def refusing() -> Iterator[int]:
    """A bound port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


async def serve(
    on_connection: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
    address: str = "127.0.0.1",
) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(on_connection, address, 0, ssl=context)
    return server, server.sockets[0].getsockname()[1]


async def connect(
    where: tuple[Endpoint, ...], context: ssl.SSLContext | None, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await Connector(lambda: where, context, name).connect()


async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"here")
    writer.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("holdfast.svc:7077", (("holdfast.svc", 7077),)),
        ("10.0.0.1:1, [fd00::1]:2", (("10.0.0.1", 1), ("fd00::1", 2))),
    ],
)
def test_endpoints_are_names_or_addresses_with_ports(text: str, expected: object) -> None:
    assert parse_endpoints(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7077", "host:0", "host:70000", "fd00::1:2"]
)
def test_an_invalid_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"--endpoint: got .*; expected HOST:PORT"):
        parse_endpoints(text)


async def test_addresses_that_refuse_are_skipped(refusing: int) -> None:
    server, port = await serve(greet)
    async with server:
        where = (("127.0.0.1", refusing), ("127.0.0.1", refusing), ("localhost", port))
        reader, writer = await connect(where, None, "")
        received = await reader.read()
        writer.close()
        assert received == b"here"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
async def test_an_ipv6_address_can_be_connected() -> None:
    try:
        server, port = await serve(greet, address="::1")
    except OSError as error:
        pytest.skip(f"::1 cannot be used here: {error}")
    async with server:
        reader, writer = await connect((("::1", port),), None, "")
        received = await reader.read()
        writer.close()
        assert received == b"here"


async def test_an_address_that_does_not_finish_the_tls_handshake_does_not_delay_the_next(
    tmp_path: Path,
) -> None:
    async def silent_server(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    files = make(tmp_path, NAME)
    silent, silent_port = await serve(silent_server)
    server, port = await serve(greet, tls.server_context(*files))
    async with server:
        where = (("127.0.0.1", silent_port), ("127.0.0.1", port))
        reader, writer = await connect(where, tls.client_context(*files), NAME)
        received = await reader.read()
        writer.close()
    silent.close()
    assert received == b"here"


async def test_while_dns_is_down_the_last_addresses_of_a_name_are_used() -> None:
    server, port = await serve(greet)
    answers: list[list[Endpoint]] = [[("127.0.0.1", port)]]

    def resolve(host: str, _port: int) -> list[Endpoint]:
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "the name server is down")
        return answers.pop()

    connector = Connector(lambda: (("operator", 7077),), resolve=resolve)
    received = b""
    async with server:
        for _ in range(2):
            reader, writer = await connector.connect()
            received += await reader.read()
            writer.close()
    assert received == b"herehere"


async def test_a_name_without_an_address_is_named_in_the_error() -> None:
    with pytest.raises(OSError, match=r"nowhere\.invalid: .+"):
        await connect((("nowhere.invalid", 1),), None, "")


async def test_a_failure_names_every_address_and_its_reason(refusing: int) -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1: .*refused.*127\.0\.0\.1: .*refused"):
        await connect((("127.0.0.1", refusing), ("127.0.0.1", refusing - 1)), None, "")


@pytest.mark.parametrize("wrong", ["certificate", "name"])
async def test_a_server_without_the_jobs_key_or_name_is_refused(tmp_path: Path, wrong: str) -> None:
    ours = make(tmp_path / "ours", NAME)
    theirs = make(tmp_path / "theirs", NAME) if wrong == "certificate" else ours
    server, port = await serve(greet, tls.server_context(*theirs))
    async with server:
        context = tls.client_context(*ours)
        name = NAME if wrong == "certificate" else "other.jobs.holdfast.dev"
        with pytest.raises(OSError, match="certificate"):
            await connect((("127.0.0.1", port),), context, name)


async def test_the_token_never_leaves_the_machine_in_clear() -> None:
    with pytest.raises(OSError, match="no connection without TLS"):
        await connect((("192.0.2.1", 7077),), None, "")


async def test_a_link_follows_the_controller_to_a_new_port(tmp_path: Path) -> None:
    """Two controllers, one after the other; the file has the address of each."""
    file = tmp_path / "controller.json"
    welcome = m.Welcome(
        spec={}, spec_directory="", checkpoint_path="", log_directory="", heartbeat_interval_s=1.0
    )
    changes: list[str] = []
    changed = asyncio.Event()

    def note(text: str) -> None:
        changes.append(text)
        changed.set()

    async def controller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(m.encode(welcome))
        await reader.read()

    link = ControllerLink(
        Connector(endpoint_in(file)),
        lambda _: note("up"),
        lambda _: note("welcome"),
        lambda: note("down"),
    )
    running = asyncio.create_task(link.run())
    for _ in range(2):
        server, port = await serve(controller)
        file.write_text(f'{{"address": "127.0.0.1", "port": {port}}}')
        while changes[-1:] != ["welcome"]:
            changed.clear()
            await changed.wait()
        server.close()
        link.close("test")
        while changes[-1:] != ["down"]:
            changed.clear()
            await changed.wait()
    running.cancel()
    assert changes == ["up", "welcome", "down"] * 2
