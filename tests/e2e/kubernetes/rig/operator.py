"""Holdfast's operator from its image, as a process that pods reach at the rig's bridge.

It sees the image's files, read-only, and has the image's user and environment. A directory of this
machine stands for shared storage. The chart is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

from images import build
from tests.e2e.kubernetes.rig import images
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import REPOSITORY

CRD = REPOSITORY / "helm" / "holdfast" / "files" / "crd.yaml"
AGENTS_PORT = 7077
METRICS_PORT = 8080
READY_TIMEOUT_S = 60
ENTER = """\
mount -t tmpfs -o mode=755 room "$ROOM/files"
cd "$ROOM/files"
mkdir upper work root
mount -t overlay -o "$LAYERS,upperdir=$PWD/upper,workdir=$PWD/work" image root
cd root
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmp tmp
for place in "$STORAGE" "$ROOM/kube"; do mkdir -p ".$place"; mount --bind "$place" ".$place"; done
mount -o remount,bind,ro .
exec /usr/sbin/chroot --userspec="$OWNER:$OWNER" . "$@"
"""


class Operator:
    """One replica."""

    def __init__(self, cluster: Cluster, *options: str) -> None:
        self._cluster = cluster
        self.storage = cluster.run.directory / "checkpoints"
        self.storage.mkdir(exist_ok=True)
        self.storage.chmod(0o777)
        room = cluster.run.directory / "operator"
        (room / "files").mkdir(parents=True)
        config = build.config("operator")
        address = cluster.network.address
        volume = {"hostPath": {"path": str(self.storage)}}
        self.server = Server(
            cluster.run,
            "operator",
            [
                *("unshare", "--mount", "sh", "-e", "-c", ENTER, "enter"),
                *(*config["Entrypoint"], "operator"),
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
            environment={
                "ROOM": str(room),
                "STORAGE": str(self.storage),
                "OWNER": config["User"],
                "LAYERS": images.lower_directories(cluster.unpacked),
                "KUBECONFIG": str(self._write_access(room / "kube", int(config["User"]))),
                **dict(variable.split("=", 1) for variable in config["Env"]),
            },
            inherits=False,
        )

    def _write_access(self, directory: Path, owner: int) -> Path:
        """A kubeconfig that this user can read, with the authority in it."""
        config = self._cluster.kubectl().run("config", "view", "--flatten", "--raw")
        directory.mkdir()
        path = directory / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(config)
        os.chown(path, owner, owner)
        return path

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
