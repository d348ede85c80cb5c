"""Finds the programs that the rig runs.

Searches HOLDFAST_KUBERNETES_BINARIES, KUBEBUILDER_ASSETS, the cache that `make kubernetes-binaries`
fills, PATH, and the usual directories of CNI plugins, in this order. Builds nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from images import build as images
from tests.e2e.kubernetes.binaries import build
from tests.e2e.kubernetes.rig import cgroups

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
PLUGINS = ("bridge", "host-local", "loopback")
NODE = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc", *PLUGINS, "pause")
VARIABLES = ("HOLDFAST_KUBERNETES_BINARIES", "KUBEBUILDER_ASSETS")
CNI_PLACES = ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni")


@dataclass(frozen=True)
class Binaries:
    """The directories to search, in order."""

    places: tuple[Path, ...]
    path_places: tuple[Path, ...] = ()
    """The directories of PATH; not for CNI plugins, because iproute2 has a `bridge` too."""

    def find(self, name: str) -> Path | None:
        for place in self.places + (() if name in PLUGINS else self.path_places):
            path = place / name
            if path.is_file() and os.access(path, os.X_OK):
                return path.absolute()
        return None

    def path(self, name: str) -> Path:
        found = self.find(name)
        assert found is not None, f"{name} is missing; ask `refusal` first"
        return found

    def refusal(self, names: tuple[str, ...]) -> str | None:
        """Reason why these programs cannot be run, and the fix; None if all are found."""
        missing = [name for name in names if self.find(name) is None]
        if not missing:
            return None
        looked = ", ".join(str(place) for place in self.places)
        return (
            f"{', '.join(missing)} not found (looked in {looked} and PATH). Run "
            "`make kubernetes-binaries` once: it needs Go 1.26 and takes about five minutes; "
            f"or set {' or '.join(VARIABLES)} to a directory that holds them"
        )


def locate() -> Binaries:
    named = [Path(value) for variable in VARIABLES if (value := os.environ.get(variable))]
    path = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    cni = [Path(place) for place in CNI_PLACES]
    return Binaries((*named, build.cache(), *cni), tuple(path))


def machine_refusal() -> str | None:
    """Reason why this machine cannot run nodes, and the fix; None if it can."""
    if os.uname().sysname != "Linux":
        return "nodes need the namespaces of Linux"
    if os.geteuid() != 0:
        return "nodes need namespaces and cgroups, so the tests have to run as root"
    tools = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not found; install iproute2, util-linux and mount"
    if sys.version_info[:2] != images.PYTHON or not any(map(os.path.exists, images.DEBIAN_SOURCES)):
        return "the nodes' images are built on Debian 12 with Python 3.11"
    if not Path("/sys/fs/cgroup/memory").is_dir():
        return (
            "the nodes of this rig have been made to work on cgroup v1 only; boot with "
            "systemd.unified_cgroup_hierarchy=0. A cluster of your own (HOLDFAST_TEST_KUBECONFIG) "
            "serves the tests without nodes only: these here kill nodes and cut cables"
        )
    for directory in cgroups.hierarchies().values():
        if not os.access(directory, os.W_OK):
            return f"{directory} cannot be written: run outside of a container, or privileged"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        reason = tried.stderr.strip()
        return f"namespaces are refused ({reason}): run outside of a container, or privileged"
    return None
