"""A Ray cluster on this machine: one head and several raylets, each a Ray node. It is started once
for a whole test run; tests may kill Ray nodes and add others."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..ports import free_port

CPUS = 2
STORE_BYTES = 80 << 20
"""The smallest object store that Ray takes."""
NODES = 4
ATTEMPTS = 3


class RayRig:
    """The cluster. Ray nodes of `CPUS` each; the head has none, so it holds no worker."""

    def __init__(self, nodes: int = NODES) -> None:
        # Ray reads it when it is imported; a busy machine takes long to start a Ray node.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "60")
        # As in an activated environment: `python` in a submitted job is this one.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        from ray.cluster_utils import Cluster

        # Its own: Ray's job server looks there for the cluster of a submitted job, and would find
        # another cluster in the common directory. Short: it holds sockets.
        self._directory = tempfile.mkdtemp(prefix="hf-ray-")
        # Cluster also writes the address there; on a new machine no one has made the directory.
        Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        self._cluster: Any = Cluster()
        # Ray 2.51 does not report a port that it chooses itself.
        head = self._start(
            num_cpus=0, include_dashboard=True, dashboard_port=0, temp_dir=self._directory,
            dashboard_agent_listen_port=free_port(),
        )  # fmt: skip
        Path(self._directory, "ray_current_cluster").write_text(self._cluster.address)
        self.dashboard = f"http://{head.webui_url}"
        self._nodes: list[Any] = []
        # One after the other: a raylet ends when its helpers take longer than 15 s to start.
        for _ in range(nodes):
            self.add_node()
        self.address: str = self._cluster.address

    def add_node(self, **options: Any) -> None:
        self._nodes.append(self._start(**{"num_cpus": CPUS} | options))

    def _start(self, **options: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                return self._cluster.add_node(object_store_memory=STORE_BYTES, **options)
            except Exception:  # Ray raises no narrower one; usually the machine is busy
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    @property
    def num_nodes(self) -> int:
        """Ray nodes that exist and can hold workers; a drained one ends itself."""
        self._nodes = [
            node for node in self._nodes if node.all_processes["raylet"][0].process.poll() is None
        ]
        return len(self._nodes)

    def node_of(self, pid: int) -> str:
        """The Ray node whose raylet started a process."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        for node in self._nodes:
            if node.all_processes["raylet"][0].process.pid in above:
                return str(node.node_id)
        raise LookupError(f"process {pid} belongs to no Ray node that can hold workers")

    def kill_node(self, ray_node: str) -> None:
        """SIGKILL a raylet and all its processes: a lost machine."""
        (node,) = [one for one in self._nodes if one.node_id == ray_node]
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._nodes.remove(node)

    def kill_raylet(self, ray_node: str) -> None:
        """SIGKILL of a raylet alone: its processes must notice by themselves."""
        (node,) = [one for one in self._nodes if one.node_id == ray_node]
        node.all_processes["raylet"][0].process.kill()
        self._nodes.remove(node)

    def kill_newest(self) -> None:
        self.kill_node(self._nodes[-1].node_id)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


@functools.cache
def shared() -> RayRig:
    """One for all tests. Skips where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    rig = RayRig()
    atexit.register(rig.close)
    return rig


def connected() -> RayRig:
    """Makes this process a driver of it."""
    from holdfast.orchestrator.backends.ray import cluster

    rig = shared()
    cluster.connect(rig.address)
    return rig


def group_names(job: str) -> list[str]:
    """All placement groups of a job that exist, of any controller."""
    from holdfast.orchestrator.backends.ray.placement import RayGroups

    return list(RayGroups(job, {}).states())
