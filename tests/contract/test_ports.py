"""Peers are served at each port of each process, whatever strangers do there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.environment import PROGRESS_TOKEN
from holdfast.workers.agent.storage import peer_transfer
from tests.unit.runtime.frames import Frames
from tests.unit.runtime.test_agent_server import Job

from .crowd import BOUND_S, Crowd, idle, reconnecting, slow
from .port_process import DATA, DESCRIPTORS, JOB, SHARD

KINDS = (
    "data", "data-tls", "controller", "controller-tls", "metrics", "progress", "operator"
)  # fmt: skip
IDLE = DESCRIPTORS + 50
NUM_REQUESTS = 20


@dataclass
class Port:
    """A port of a process of its own, and how a peer uses it."""

    kind: str
    directory: Path
    process: subprocess.Popen[str]
    facts: dict[str, Any]

    @property
    def number(self) -> int:
        return int(self.facts["port"])

    def use(self) -> None:
        """One request of a peer. Raises if it fails."""
        request = getattr(self, f"_use_{self.kind.partition('-')[0]}")
        request()

    def _use_data(self) -> None:
        keys = self.directory / "data" if self.kind == "data-tls" else None
        ours = peer_transfer.credentials("secret", keys, "job")
        memory = peer_transfer.fetch("127.0.0.1", self.number, ours, SHARD)
        assert os.pread(memory.fd, memory.num_bytes, 0) == DATA

    def _use_controller(self) -> None:
        job = Job(JOB, self.directory / "controller", with_tls=False)
        with_tls = self.kind == "controller-tls"

        async def join() -> None:
            more: dict[str, Any] = {}
            if with_tls:
                more = {"ssl": job.client(), "server_hostname": job.tls_name}
            frames = Frames(*await asyncio.open_connection("127.0.0.1", self.number, **more))
            frames.send(job.hello())
            assert isinstance(await frames.receive(), wire.Welcome)
            frames.close()

        asyncio.run(asyncio.wait_for(join(), BOUND_S))

    def _get(self, path: str, body: bytes | None = None, **headers: str) -> bytes:
        url = f"http://127.0.0.1:{self.number}{path}"
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
            return bytes(answer.read())

    def _use_metrics(self) -> None:
        assert b"holdfast_job_steps" in self._get("/metrics")

    def _use_operator(self) -> None:
        assert self._get("/healthz") == b"ok\n" and self._get("/metrics") == b"metrics"

    def _use_progress(self) -> None:
        token = Path(self.facts[PROGRESS_TOKEN]).read_text(encoding="ascii")
        body = b'{"trainerStatus": {"metrics": [{"name": "current_step", "value": "7"}]}}'
        assert self._get("/", body, Authorization=f"Bearer {token}") == b""

    def _use_store(self) -> None:
        from holdfast.workers.session.store import open_store

        store = open_store(1, 2, "127.0.0.1", self.number, one_machine=True)
        store.set("key", "value")
        assert store.get("key") == b"value"


def begin(directory: Path, kinds: Sequence[str]) -> Iterator[dict[str, Port]]:
    command = [sys.executable, "-m", f"{__package__}.port_process", str(directory), *kinds]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    facts = json.loads(process.stdout.readline())
    yield {kind: Port(kind, directory, process, facts[kind]) for kind in kinds}
    process.stdin.close()
    process.wait(BOUND_S)


@pytest.fixture(scope="module")
def own_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Port]]:
    yield from begin(tmp_path_factory.mktemp("own"), KINDS)


@pytest.fixture(scope="module")
def ports_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Port]]:
    yield from begin(tmp_path_factory.mktemp("ranks"), ["store"])


@pytest.fixture(params=[*KINDS, "store"])
def port(request: pytest.FixtureRequest) -> Port:
    ports = "ports_of_ranks" if request.param == "store" else "own_ports"
    return request.getfixturevalue(ports)[request.param]


@pytest.mark.parametrize(
    ("behave", "size"),
    [(idle, IDLE), (slow, 80), (reconnecting, 80)],
    ids=["idle", "slow", "reconnecting"],
)
def test_peers_are_served_beside_strangers(port: Port, behave: Any, size: int) -> None:
    port.use()
    with Crowd(port.number, behave, size):
        for _ in range(NUM_REQUESTS):
            port.use()
    assert port.process.poll() is None
