"""A process with ports of Holdfast and few descriptors: `python -m tests.contract.port_process
DIRECTORY KIND...`. It prints what a client needs, as JSON, and ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.orchestrator.hosts.kubernetes.run import HttpServer
from holdfast.orchestrator.protocol.environment import PROGRESS_URL
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.strangers import raise_descriptor_limit
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.observe.prometheus import MetricsServer
from holdfast.workers.agent.process.progress_server import ProgressServer
from holdfast.workers.agent.storage import peer_transfer
from holdfast.workers.agent.storage.memfd import Memfd
from tests.unit.runtime.certificates import make
from tests.unit.runtime.harness import make_job
from tests.unit.runtime.observe.test_prometheus import make_view
from tests.unit.runtime.test_agent_server import Job

DESCRIPTORS = 256
DATA = b"shard" * 10_000
SHARD = StagedShard(step=4, generation=2, shard=0, num_shards=1, num_bytes=len(DATA))
JOB = "space/one"

Served = dict[str, Any]
"""Arguments of a client; `keep` is for the process."""


def data(directory: Path | None) -> Served:
    def on_get(_get: peer_transfer.Get) -> peer_transfer.Answer:
        memory = Memfd("shard", len(DATA))
        os.write(memory.fd, DATA)
        return peer_transfer.TransferBuffer(memory, len(DATA), 1, lambda _ok: None)

    credentials = peer_transfer.credentials("secret", directory, "job")
    port = peer_transfer.DataPort(credentials, on_get, lambda _put: "no room")
    return {"port": port.open("127.0.0.1"), "keep": port}


def data_tls(directory: Path) -> Served:
    make(directory / "data", "job")
    return data(directory / "data")


async def controller(directory: Path, *, with_tls: bool = False) -> Served:
    server = AgentServer()
    await server.open(tls=with_tls)
    Job(JOB, directory / "controller", with_tls).register(server)
    return {"port": server.port, "keep": server}


def metrics() -> Served:
    return {"port": MetricsServer(make_job(), make_view).open(0)}


def progress() -> Served:
    variables = ProgressServer(lambda _seat, _report: None, print).environment(1, 0)
    return {"port": int(variables[PROGRESS_URL].split(":")[2].strip("/")), **variables}


async def operator() -> Served:
    async def scrape() -> bytes:
        return b"metrics"

    server = HttpServer(lambda: "", scrape)
    await server.open("127.0.0.1", 0)
    return {"port": server.port, "keep": server}


def store() -> Served:
    """The ranks' store has no greeting: the limit that agents raise protects it."""
    from holdfast.workers.session.store import open_store

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, 16 * DESCRIPTORS))
    raise_descriptor_limit()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"port": port, "keep": open_store(0, 2, "127.0.0.1", port, one_machine=True)}


async def serve(directory: Path, kinds: Sequence[str]) -> None:
    if "store" not in kinds:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    served: dict[str, Served] = {}
    for kind in kinds:
        match kind:
            case "data":
                served[kind] = data(None)
            case "data-tls":
                served[kind] = data_tls(directory)
            case "controller" | "controller-tls":
                served[kind] = await controller(directory, with_tls=kind == "controller-tls")
            case "metrics":
                served[kind] = metrics()
            case "progress":
                served[kind] = progress()
            case "operator":
                served[kind] = await operator()
            case "store":
                served[kind] = store()
    print(json.dumps(served, default=repr), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2:]))
