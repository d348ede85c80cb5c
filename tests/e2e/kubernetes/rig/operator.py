"""Holdfast's operator as a process of this machine, which pods reach at the rig's bridge.

A host directory stands for shared storage. The chart is tested elsewhere.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.e2e.kubernetes.rig import images
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import REPOSITORY

CRD = REPOSITORY / "helm" / "holdfast" / "files" / "crd.yaml"
AGENTS_PORT = 7077
METRICS_PORT = 8080
READY_TIMEOUT_S = 60


class Operator:
    """One replica."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        self._cluster = cluster
        self.storage = cluster.run.directory / "checkpoints"
        self.storage.mkdir(exist_ok=True)
        self.storage.chmod(0o777)
        address = cluster.network.address
        volume = {"hostPath": {"path": str(self.storage)}}
        self.server = Server(
            cluster.run,
            "operator",
            [
                Path(sys.prefix) / "bin" / "holdfast",
                "operator",
                f"--agent-endpoint={address}:{AGENTS_PORT}",
                f"--listen={address}:{AGENTS_PORT}",
                f"--metrics-address={address}",
                f"--metrics-port={METRICS_PORT}",
                f"--worker-image={images.image('worker')}",
                f"--checkpoint-root={self.storage}",
                f"--checkpoint-volume={json.dumps(volume)}",
                "--lease-namespace=default",
                "--log-format=text",
                "--status-interval-seconds=0.5",  # tests wait for steps in the status
                *options,
            ],
            environment={"KUBECONFIG": str(cluster.control_plane.kubeconfig)},
            # The operator runs as root here and workers do not, and both write to the same
            # directory. In a cluster both are the same user.
            umask=0,
        )

    def install(self) -> None:
        kubectl = self._cluster.kubectl()
        kubectl.apply(CRD)
        kubectl.served("trainingjobs.holdfast.dev")

    def start(self) -> None:
        """Return when it leads."""
        self.server.start()
        self.server.wait_ready(self.leads, timeout_s=READY_TIMEOUT_S)

    def leads(self) -> bool:
        return "holdfast_operator_leader 1.0" in self.get("/metrics") and self.ready()

    def ready(self) -> bool:
        return self.get("/readyz") != ""

    def get(self, path: str) -> str:
        """A page of its HTTP server; empty without a 2xx response."""
        url = f"http://{self._cluster.network.address}:{METRICS_PORT}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def ensure_running(self) -> None:
        """Restart an operator that has ended, as the kubelet does."""
        if not self.server.running:
            self.start()

    def kill(self) -> None:
        self.server.kill()
