"""Connections to the agents' port from processes without a token, and bytes that are no message."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.framing import BadFrame, FrameReader, frame
from holdfast.orchestrator.runtime.agent_server import AgentServer

from .frames import Frames
from .harness import node_facts
from .test_agent_server import Job, until

DEEP = b"\x82\xa4type\xa9heartbeat\xa1x" + b"\x91" * 200_000 + b"\xc0"
NOT_UTF8 = b"\x82\xa4type\xa7refused\xa6detail\xa1\xff"
NOT_UTF8_KEY = b"\x81\xa1\xff\x01"


@pytest.mark.parametrize("body", [DEEP, NOT_UTF8, NOT_UTF8_KEY, b"", b"\xc1", b"\x81\xa4type"])
def test_what_is_no_message_is_a_bad_frame(body: bytes) -> None:
    with pytest.raises(BadFrame):
        wire.decode(body)


def test_a_reader_refuses_a_long_frame_by_its_length_alone() -> None:
    reader = FrameReader(10)
    assert list(reader.feed(frame(b"0123456789")[:-1])) == []
    assert reader.num_waiting == 13
    assert list(reader.feed(b"9")) == [b"0123456789"]
    with pytest.raises(BadFrame, match="a frame of 11 bytes; at most 10"):
        list(reader.feed((11).to_bytes(4, "big")))
    reader = FrameReader(10)
    reader.max_bytes = 11
    assert list(reader.feed(frame(b"01234567890"))) == [b"01234567890"]


async def closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read(1) == b""
    return True


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param((limits.MAX_GREETING_BYTES + 1).to_bytes(4, "big"), id="long"),
        pytest.param(frame(DEEP), id="deep"),
        pytest.param(frame(NOT_UTF8), id="text"),
    ],
)
async def test_a_stranger_is_closed_without_a_traceback(tmp_path: Path, sent: bytes) -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    endpoint = AgentServer()
    await endpoint.open()
    job = Job("space/one", tmp_path, with_tls=False)
    job.register(endpoint)
    reader, writer = await asyncio.open_connection(endpoint.address, endpoint.port)
    writer.write(sent)
    assert await closed(reader)
    writer.close()
    await endpoint.close()
    assert errors == []


async def test_strangers_together_hold_a_limited_number_of_bytes(tmp_path: Path) -> None:
    endpoint = AgentServer()
    await endpoint.open()
    job = Job("space/one", tmp_path, with_tls=False)
    job.register(endpoint)
    part = limits.MAX_GREETING_BYTES.to_bytes(4, "big") + bytes(limits.MAX_GREETING_BYTES - 1)
    held = limits.MAX_UNAUTHENTICATED_BYTES // len(part)
    opened = []
    for number in range(held + 3):
        reader, writer = await asyncio.open_connection(endpoint.address, endpoint.port)
        writer.write(part)
        opened.append((reader, writer))
        if number < held:
            await until(
                lambda n=number: sum(endpoint._unidentified.values()) == (n + 1) * len(part)
            )
        else:
            assert await closed(reader), f"connection {number}"
    assert sum(endpoint._unidentified.values()) <= limits.MAX_UNAUTHENTICATED_BYTES
    frames = await Frames.dial(endpoint.address, endpoint.port)
    frames.send(job.hello())
    assert isinstance(await frames.receive(), wire.Welcome), "an agent still joins"
    frames.close()
    for _, writer in opened:
        writer.close()
    await endpoint.close()


async def test_an_agent_with_a_large_inventory_joins_and_may_send_long_frames(
    tmp_path: Path,
) -> None:
    endpoint = AgentServer()
    await endpoint.open()
    job = Job("space/one", tmp_path, with_tls=False)
    job.register(endpoint)
    staged = tuple(StagedShard(10**9, 10**6, n, 4096, 10**11) for n in range(1000))
    frames = await Frames.dial(endpoint.address, endpoint.port)
    frames.send(job.hello(joined=wire.NodeJoined(facts=node_facts(), staged=staged)))
    assert isinstance(await frames.receive(), wire.Welcome)
    frames.send(wire.AgentEvent(text="x" * (4 * limits.MAX_GREETING_BYTES)))
    await until(lambda: ("AgentEvent", "n") in job.sink.log)
    frames.close()
    await endpoint.close()


def test_a_node_joins_by_its_greeting_alone() -> None:
    """Later, it could give facts that the controller has refused or corrected."""
    with pytest.raises(BadFrame):
        wire.decode(wire.encode(wire.NodeJoined(facts=node_facts()))[4:])
