"""A Ray cluster whose autoscaler adds nodes: Ray's own autoscaler with its fake provider, which
starts real raylets on this machine.

This process becomes its driver until `close`. A process is a driver of one cluster at a time, so it
disconnects from the cluster of cluster_rig.py before; that one's tests connect again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..ports import free_port
from . import cluster_rig
from .headed_cluster import ATTEMPTS, START_S, kill_tree

IDLE_MINUTES = 0.1
BOUND_S = 240.0
EMPTY = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
)  # fmt: skip


class GrowingCluster:
    """A head without CPUs, and up to `most` further Ray nodes when a job requests them."""

    def __init__(self, most: int) -> None:
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
        from ray.util import get_node_ip_address

        from holdfast.orchestrator.backends.ray import cluster

        self._directory = Path(tempfile.mkdtemp(prefix="hf-grow-"))  # short: it holds sockets
        port = free_port()
        self.address = f"{get_node_ip_address()}:{port}"
        self._config = self._directory / "autoscaler.json"
        self._config.write_text(json.dumps(config(self.address, most)))
        try:
            self._head = self._start(port)
            ray.shutdown()
            cluster.connect(self.address)
        except BaseException:
            self.close()
            raise

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_raylet_start_wait_time_s": str(START_S),
        }
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", str(port),
            "--autoscaling-config", str(self._config), "--num-cpus", "0", "--block",
            "--temp-dir", str(self._directory), "--include-dashboard", "false",
            "--object-store-memory", str(cluster_rig.STORE_BYTES), "--disable-usage-stats",
            "--ray-client-server-port", str(free_port()),
            "--dashboard-agent-listen-port", "0",
        ]  # fmt: skip
        log = self._directory / "start.log"
        for _ in range(ATTEMPTS):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            give_up = time.monotonic() + BOUND_S
            while process.poll() is None and time.monotonic() < give_up:
                if "Ray runtime started" in log.read_text():
                    return process
                time.sleep(0.1)  # the log is the only sign
            kill_tree(process.pid)
        raise AssertionError(log.read_text())

    def nodes(self) -> set[str]:
        """Ray nodes that can hold workers."""
        from holdfast.orchestrator.backends.ray import ray_nodes

        return {
            n for n, one in ray_nodes.alive_nodes().items() if one["Resources"].get("CPU", 0) > 0
        }

    def until(self, true: Callable[[set[str]], bool]) -> set[str]:
        give_up = time.monotonic() + BOUND_S
        while not true(found := self.nodes()):
            assert time.monotonic() < give_up, f"{found}\n{self.monitor_log()}"
            time.sleep(0.2)  # Ray sends no event
        return found

    def kill_node(self, ray_node: str) -> None:
        """SIGKILL a raylet and all its processes."""
        for process in psutil.Process(self._head.pid).children(recursive=True):
            if process.name() == "raylet" and f"--node_id={ray_node}" in " ".join(cmdline(process)):
                kill_tree(process.pid)
                return
        raise LookupError(ray_node)

    def monitor_log(self) -> str:
        return "\n".join(
            path.read_text()[-2000:]
            for path in self._directory.glob("session_latest/logs/monitor.*")
        )

    def close(self) -> None:
        import ray

        ray.shutdown()
        if hasattr(self, "_head"):
            kill_tree(self._head.pid)  # the provider's raylets are its children
            self._head.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def config(address: str, most: int) -> dict[str, Any]:
    """Configuration that `ray up` would read from a file."""
    from ray.autoscaler._private.fake_multi_node.node_provider import (
        FAKE_HEAD_NODE_ID,
        FakeMultiNodeProvider,
    )

    worker = {"CPU": cluster_rig.CPUS, "object_store_memory": cluster_rig.STORE_BYTES}
    nothing: dict[str, list[str]] = {key: [] for key in EMPTY}
    return {
        "cluster_name": "growing",
        "max_workers": most,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": IDLE_MINUTES,
        "provider": {
            # By its module: the package lacks the file that the short name refers to.
            "type": "external",
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": worker, "node_config": {}, "min_workers": 0, "max_workers": most,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **nothing,
    }  # fmt: skip
