"""One node: namespaces and cgroups of this machine with containerd and kubelet, and its faults.

A node writes only into its directory and its namespaces.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.e2e.kubernetes.rig import cgroups, node_config
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import condition
from tests.e2e.kubernetes.rig.network import Network
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.waiting import until

INIT = Path(__file__).with_name("node_init.sh")
# A process joins its cgroups before it makes the namespace whose root they become.
ENTER = (
    'for directory in "$@"; do echo $$ >"$directory/cgroup.procs"; done; '
    "exec unshare --cgroup --net --mount --uts --ipc --pid --fork --kill-child --mount-proc "
    'bash "$NODE_INIT"'
)
PROGRAMS = ("kubelet", "containerd", "ctr", "runc", "containerd-shim-runc-v2")
READY_TIMEOUT_S = 60


class Node:
    """Node that can be started, cut off the network, powered off, and removed."""

    def __init__(
        self,
        control_plane: ControlPlane,
        network: Network,
        index: int,
        unpacked: Path,
        labels: Mapping[str, str],
        registry: str,
    ) -> None:
        self.run = control_plane.run
        self.control_plane = control_plane
        self.network = network
        self.index = index
        self.name = f"node{index}"
        self.address = network.node_address(index)
        self.directory = self.run.directory / self.name
        self.directory.mkdir()
        self._registry = registry
        # Memory, unless whole images are pulled.
        self._containerd = (
            self.directory / "containerd" if registry else Path("/var/lib/containerd")
        )
        self._write_configuration()
        hierarchies = cgroups.make(self.run.name, self.name)
        self._server = Server(
            self.run,
            self.name,
            ["sh", "-c", ENTER, "enter", *hierarchies.values()],
            environment={
                "NODE_INIT": str(INIT),
                "NODE_NAME": self.name,
                "NODE_ADDRESS": self.address,
                "NODE_DIRECTORY": str(self.directory),
                "NODE_HIERARCHIES": " ".join(hierarchies),
                "NODE_UNPACKED": str(unpacked),
                "NODE_CONTAINERD": str(self._containerd),
                "NODE_LABELS": ",".join(f"{key}={value}" for key, value in labels.items()),
                "GOMAXPROCS": "2",
                "PATH": self._path(),
            },
        )

    def _path(self) -> str:
        binaries = self.control_plane.binaries
        places = {str(binaries.path(name).parent) for name in PROGRAMS}
        return os.pathsep.join([*sorted(places), os.environ["PATH"]])

    def _write_configuration(self) -> None:
        binaries = self.control_plane.binaries
        self._write(
            "containerd.toml",
            node_config.containerd(
                self.directory,
                plugins=binaries.path("bridge").parent,
                runc=binaries.path("runc"),
                root=self._containerd,
            ),
        )
        if self._registry:
            (self.directory / "registries" / self._registry).mkdir(parents=True)
            host = f'[host."http://{self._registry}"]\ncapabilities = ["pull", "resolve"]\n'
            self._write(f"registries/{self._registry}/hosts.toml", host)
        (self.directory / "cni").mkdir()
        pods = self.network.pod_range(self.index)
        network = node_config.cni(str(self.network.subnet), *pods)
        self._write("cni/rig.conflist", json.dumps(network))
        kubelet = node_config.kubelet(
            self.address,
            self.network.address,
            self.control_plane.authority.file,
            self.control_plane.settings.kubelet,
        )
        self._write("kubelet.yaml", yaml.safe_dump(kubelet))
        default = subprocess.run(
            [binaries.path("ctr"), "oci", "spec"], capture_output=True, text=True, check=True
        )
        spec = json.loads(default.stdout)
        if not self._registry:
            spec = node_config.base_spec(spec)
        self._write("base-spec.json", json.dumps(spec))
        pair = self.control_plane.authority.sign(
            self.name, f"system:node:{self.name}", organization="system:nodes"
        )
        config = self.control_plane.write_kubeconfig(self.name, pair=pair)
        (self.directory / "kubeconfig").symlink_to(config)

    def _write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def start(self) -> None:
        """Return when the node has its network; `wait_ready` waits for the rest."""
        self._server.start()
        pid = self._server.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        until(
            lambda: self._server.running and children.read_text().strip(),
            f"the first process of {self.name}",
            timeout_s=10,
            every_s=0.01,
            last=self._server.tail,
        )
        self._init_pid = int(children.read_text().split()[0])
        self.run.record(f"{self.name}-init", self._init_pid)
        self.network.plug(self.index, self._init_pid)

    def wait_ready(self, expected: str = "True", *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for the status of the node's condition Ready: "True", "False" or "Unknown"."""

        def reached() -> bool:
            if expected == "True" and not self._server.running:
                raise AssertionError(f"{self.name} ended:\n{self.report()}")
            return self.readiness() == expected

        until(
            reached,
            f"{self.name} to be Ready={expected}",
            timeout_s=timeout_s,
            every_s=0.2,
            last=self.report,
        )

    def readiness(self) -> str:
        text = self.control_plane.request(f"/api/v1/nodes/{self.name}")
        return condition(json.loads(text), "Ready") if text else ""

    def advertise(self, resource: str, amount: int) -> None:
        """Report devices that do not exist, such as nvidia.com/gpu, to the scheduler."""
        patch = {"status": {"capacity": {resource: str(amount)}}}
        self.control_plane.kubectl().run(
            *("patch", "node", self.name, "--subresource=status", "--patch", json.dumps(patch))
        )

    def report(self) -> str:
        """The last lines of the node's logs."""
        parts = [f"{self._server.log.name}:\n{self._server.tail()}"]
        for name in ("containerd.log", "kubelet.log"):
            path = self.directory / name
            if path.exists():
                tail = path.read_text(errors="replace").splitlines()[-15:]
                parts.append("\n".join([f"{name}:", *tail]))
        return "\n".join(parts)

    def cut(self) -> None:
        """A network partition, in both directions."""
        self.network.cut(self.index)

    def heal(self) -> None:
        self.network.heal(self.index)

    def lose_power(self) -> None:
        """Cut the network first, so that no socket sends a FIN, then kill all processes."""
        self.cut()
        self.kill()

    def kill(self) -> None:
        """Kill all processes of the node and wait until they are gone."""
        if self._server.running:
            os.kill(self._init_pid, signal.SIGKILL)
            self._server.kill()
            self.run.forget(f"{self.name}-init")
        cgroups.remove(self.run.name, self.name)

    def processes(self) -> list[int]:
        """The processes of the node, by the process ids of this machine."""
        return cgroups.processes(self.run.name, self.name)

    def remove(self) -> None:
        self.kill()
        self.network.unplug(self.index)
