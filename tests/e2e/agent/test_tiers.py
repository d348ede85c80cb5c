"""The memory and storage tiers with real memory, sockets and files."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Restore, ShardLocation
from holdfast.orchestrator.protocol.launcher_protocol import StopNode
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.workers.agent.storage import peer_transfer

from .agent_rig import TOKEN, Rig, send_to_launcher, watched

pytestmark = pytest.mark.e2e
_names = (f"t-{number}" for number in itertools.count())


@pytest.fixture
def node(rig: Rig, launcher: socket.socket) -> Iterator[str]:
    yield from start(rig, launcher)


@pytest.fixture
def other(rig: Rig, launcher: socket.socket) -> Iterator[str]:
    yield from start(rig, launcher)


def start(rig: Rig, launcher: socket.socket) -> Iterator[str]:
    name = next(_names)
    rig.start_node(launcher, name)
    yield name
    send_to_launcher(launcher, StopNode(node=name))


def mode(rig: Rig, text: str) -> None:
    (rig.directory / "mode").write_text(text)


def content(step: int, shard: int) -> bytes:
    return bytes([step, shard]) * 500_000


def data_port(rig: Rig, node: str) -> int:
    return rig.controller.wait(m.Hello, node).joined.facts.data_port


def staged(rig: Rig, node: str, generation: int, step: int = 3) -> None:
    rig.controller.wait(
        m.Heartbeat, node, lambda b: b.generation == generation and b.staged_step == step
    )


def test_staged_state_survives_its_workers_and_is_restored(rig: Rig, node: str) -> None:
    mode(rig, "stage")
    rig.launch(node, 1)
    staged(rig, node, 1)
    stopped = rig.stop(node, 1)
    steps = {(s.step, s.shard) for s in stopped.staged}
    assert steps == {(2, 0), (2, 1), (3, 0), (3, 1)}
    mode(rig, "fetch")
    rig.launch(node, 2, restore=Restore(step=3, generation=1, num_shards=2))
    rig.finished(node, 2)
    for rank in range(2):
        for shard in range(2):
            assert f"fetched {shard} 1000000 True" in rig.log(2, rank)
    rig.stop(node, 2)


def test_a_new_node_fetches_shards_from_the_memory_of_another(
    rig: Rig, node: str, other: str
) -> None:
    mode(rig, "stage")
    rig.launch(node, 11)
    staged(rig, node, 11)
    sources = tuple(ShardLocation(k, node, "127.0.0.1", data_port(rig, node)) for k in range(2))
    mode(rig, "fetch")
    rig.launch(other, 12, restore=Restore(step=3, generation=11, num_shards=2, sources=sources))
    rig.finished(other, 12)
    assert rig.log(12, 0).count("True") == 2, rig.log(12, 0)
    rig.stop(other, 12)
    rig.stop(node, 11)


def test_the_shards_of_a_lost_node_are_in_the_memory_of_its_buddy(
    rig: Rig, node: str, other: str
) -> None:
    mode(rig, "stage")
    rig.launch(node, 21, buddy=(other, data_port(rig, other)))
    staged(rig, node, 21)
    port = data_port(rig, other)
    first = rig.controller.wait(m.StepCopied, node, lambda r: r.generation == 21)
    rig.controller.send(node, m.CopyStep(generation=21, step=3, confirmed=first.step))
    rig.controller.wait(m.StepCopied, node, lambda r: r.generation == 21 and r.step == 3)
    rig.controller.wait(m.Heartbeat, other, lambda b: b.staged_step == -1)
    wanted = peer_transfer.StagedShard(3, 21, 1, 2, 1_000_000)
    credentials = peer_transfer.PeerCredentials(TOKEN)
    memory = peer_transfer.fetch("127.0.0.1", port, credentials, wanted)
    rig.controller.send(node, m.Chaos(kind="kill-node"))
    assert os.pread(memory.fd, memory.num_bytes, 0) == content(3, 1)
    stopped = rig.stop(other, 21)
    assert {(3, 0), (3, 1)} <= {(s.step, s.shard) for s in stopped.staged}


def test_the_data_port_refuses_requests_without_the_token(rig: Rig, node: str) -> None:
    mode(rig, "stage")
    rig.launch(node, 31)
    staged(rig, node, 31)
    wanted = peer_transfer.StagedShard(3, 31, 0, 2, 0)
    with pytest.raises(peer_transfer.PeerError, match="wrong token"):
        peer_transfer.fetch(
            "127.0.0.1", data_port(rig, node), peer_transfer.PeerCredentials("guess"), wanted
        )
    with socket.create_connection(("127.0.0.1", data_port(rig, node))) as sock:
        sock.sendall(struct.pack(">I", 2**31) + b"nonsense")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    rig.stop(node, 31)


def test_storage_gets_the_staged_bytes_and_their_checksum(rig: Rig, node: str) -> None:
    mode(rig, "stage finish")
    rig.launch(node, 41, persist_every_steps=100)
    for shard in range(2):
        report = rig.controller.wait(m.ShardPersisted, node, lambda p, k=shard: p.shard.shard == k)
        assert (report.shard.step, report.generation) == (3, 41)
        directory = rig.directory / "checkpoints" / directory_name(3, 41)
        data = (directory / shard_file_name(shard, 2)).read_bytes()
        assert data == content(3, shard)
        assert xxhash.xxh3_128_hexdigest(data) == report.shard.checksum
    assert not list(directory.glob(".*"))
    rig.controller.wait(m.WorkerExited, node, lambda e: e.exit.code == 0 and e.exit.rank == 0)
    rig.stop(node, 41)


def test_a_store_that_cannot_be_written_is_reported_and_training_continues(
    rig: Rig, node: str
) -> None:
    blocked = rig.directory / "checkpoints" / directory_name(0, 51)
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file where a directory must be")
    mode(rig, "stage")
    rig.launch(node, 51, persist_every_steps=1)
    failed = rig.controller.wait(m.PersistFailed, node, lambda p: p.generation == 51)
    assert failed.detail
    staged(rig, node, 51)
    rig.stop(node, 51)


def test_the_memory_tier_leaves_nothing_behind_when_the_agent_is_killed(
    rig: Rig, node: str
) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    mode(rig, "stage")
    rig.launch(node, 61)
    staged(rig, node, 61)
    memory = [str(fd.readlink()) for fd in Path(f"/proc/{rig.nodes[node]}/fd").iterdir()]
    assert sum("memfd:holdfast-" in name for name in memory) >= 6
    pids = rig.pids(node)
    with watched([rig.nodes[node], *pids["server"], *pids["workers"]]) as gone:
        os.kill(rig.nodes[node], signal.SIGKILL)
        gone()
    assert {path.name for path in Path("/dev/shm").iterdir()} <= before
