"""A replica of the operator for a control plane without nodes. There are no agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest import TempPathFactory

from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.ports import free_port

BOUND_S = 90
LEASE_S = 8
"""Long enough for a machine that is busy with other tests."""


class Replica:
    """One operator process for some namespaces, standby or leading."""

    def __init__(
        self, kubeconfig: Path, directory: Path, namespaces: tuple[str, ...], *options: str
    ) -> None:
        self.port, self.agents_port = free_port(), free_port()
        self.log = directory / f"operator-{self.port}.log"
        self.storage = directory / "checkpoints"
        self._command = [
            str(Path(sys.prefix) / "bin" / "holdfast"),
            "operator",
            f"--agent-endpoint=127.0.0.1:{self.agents_port}",
            f"--listen=127.0.0.1:{self.agents_port}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.port}",
            f"--checkpoint-root={self.storage}",
            f"--lease-namespace={namespaces[0]}",
            f"--lease-seconds={LEASE_S}",
            f"--identity=replica-{self.port}",
            "--log-format=text",
            "--status-interval-seconds=0.5",
            *(f"--namespace={one}" for one in namespaces),
            *options,
        ]
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when its HTTP server answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )
        self.until(lambda: self.get("/healthz")[0] == 200, "the operator's /healthz")

    def start_leading(self) -> Replica:
        self.start()
        self.wait_leading()
        return self

    def wait_leading(self) -> None:
        self.until(self.leads, "the operator to lead")

    def leads(self) -> bool:
        leading = "holdfast_operator_leader 1.0" in self.get("/metrics")[1]
        return leading and self.get("/readyz")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """(status, text); status 0 without an answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, OSError):
            return 0, ""

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def close(self) -> int:
        """Send SIGTERM; return the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        until(condition, what, timeout_s=BOUND_S, last=self.tail)

    def tail(self, num_lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def leading(kubeconfig: Path, factory: TempPathFactory, *namespaces: str) -> Iterator[Replica]:
    """A fixture's operator."""
    replica = Replica(kubeconfig, factory.mktemp("operator"), namespaces).start_leading()
    yield replica
    assert replica.close() == 0, replica.tail()
