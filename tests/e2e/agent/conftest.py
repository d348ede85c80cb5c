"""One node launcher for all tests of this folder, because the import of torch takes seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .agent_rig import Rig

SCRIPT = '''
"""A worker without a session; the file `mode` selects what it does."""
import mmap, os, sys, time
from pathlib import Path
from holdfast.workers import worker_protocol as wire, worker_transport as transport

print("here", os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], flush=True)
seat = transport.attached.assign
link = transport.attached.link
link.setblocking(True)
rank = seat.seat.rank
mode = (Path(seat.spec_directory) / "mode").read_text()


def content(step, shard):
    return bytes([step, shard]) * 500_000


def stage(step, buffer, memory):
    data = content(step, seat.seat.shard)
    memory[: len(data)] = data
    transport.send(link, wire.Staged(buffer=buffer, step=step, num_bytes=len(data)))
    transport.send(link, wire.Progress(step=step, loss=1.0))


def buffers():
    for _ in range(3):
        transport.send(link, wire.BufferRequest(num_bytes=1_000_000))
    memory, free = {}, []
    while True:
        while not free:
            message, fd = transport.receive(link)
            if isinstance(message, wire.Buffer):
                memory[message.buffer] = mmap.mmap(fd, message.num_bytes)
                os.close(fd)
            free.append(message.buffer)
        number = free.pop(0)
        yield number, memory[number]


if "fetch" in mode:
    want = seat.membership.restore
    for shard in range(want.num_shards):
        transport.send(link, wire.FetchShard(shard=shard))
        message, fd = transport.receive(link)
        if isinstance(message, wire.NoShard):
            print("missing", shard, message.detail, flush=True)
            continue
        data = os.pread(fd, message.num_bytes, 0)
        same = data == content(want.step, shard)
        print("fetched", shard, message.num_bytes, same, flush=True)
    transport.send(link, wire.Progress(step=want.step + 1))
if "stage" in mode:
    source = buffers()
    for step in range(4):
        stage(step, *next(source))
if "raise" in mode and rank == 1:
    transport.send(link, wire.Progress(step=7))
    raise ValueError("the seventh step is cursed")
if "orphan" in mode:
    import subprocess
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("orphan", child.pid, flush=True)
if "finish" in mode:
    transport.send(link, wire.Finished(step=3))
    sys.exit(0)


def wait_for_the_end():
    transport.send(link, wire.Progress(step=1000))
    while True:
        time.sleep(1000)


wait_for_the_end()
'''


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = make_rig(tmp_path_factory.mktemp("rig"))
    rig.start_launcher()
    yield rig
    rig.end()


@pytest.fixture(scope="session")
def launcher(rig: Rig) -> Iterator[socket.socket]:
    with rig.connect_launcher() as sock:
        yield sock


def make_rig(directory: Path) -> Rig:
    (directory / "train.py").write_text(SCRIPT)
    (directory / "mode").write_text("")
    return Rig(directory, {"script": "train.py", "args": ["--lr", "1"]})
