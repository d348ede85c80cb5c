"""A Ray cluster whose head can be lost: `ray start` for the head and for every other Ray node, and
a Redis for the head's store on request. The cluster of cluster_rig.py is shared, so it keeps its
head."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from ..ports import free_port
from . import cluster_rig

BOUND_S = 240.0
ATTEMPTS = 8
START_S = 40
"""A raylet ends when its helpers need over 15 s to start, and `ray start` misses it."""
GIVEN_UP_S = 10
"""Seconds that Ray's processes wait for a head that never comes back; 60 by default."""
WAITED_FOR_S = 600
"""Seconds for a head that comes back: on a busy machine its start takes long."""


class HeadedCluster:
    """A head without CPUs and further Ray nodes. The head comes back at the same address."""

    def __init__(self, *, redis: bool = False, nodes: int = 2, dashboard: bool = False) -> None:
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
        if redis and shutil.which("redis-server") is None:
            pytest.skip("no redis-server here: apt-get install redis-server")
        # Short: it holds sockets, whose paths have a limit.
        self._directory = Path(tempfile.mkdtemp(prefix="hf-head-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        patience_s = WAITED_FOR_S if redis else GIVEN_UP_S
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_raylet_start_wait_time_s": str(START_S),
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(patience_s),
        }
        if redis:
            self.environment["RAY_REDIS_ADDRESS"] = self._start_redis()
        self._port = free_port()
        from ray.util import get_node_ip_address

        self.address = f"{get_node_ip_address()}:{self._port}"
        self._words = ["--include-dashboard", str(dashboard).lower()]
        if dashboard:
            port = free_port()
            self.dashboard = f"http://127.0.0.1:{port}"
            self._words += ["--dashboard-port", str(port)]
        try:
            self.start_head()
            for _ in range(nodes):
                self._ray("--address", self.address, "--num-cpus", str(cluster_rig.CPUS))
        except BaseException:
            self.close()
            raise

    def start_head(self) -> None:
        self._head = self._ray(
            "--head", "--port", str(self._port), "--num-cpus", "0",
            "--temp-dir", str(self._directory), *self._words,
            "--ray-client-server-port", str(free_port()),
        )  # fmt: skip

    def lose_head(self) -> None:
        """SIGKILL of its raylet, its GCS and all their processes."""
        kill_tree(self._head.pid)
        self._head.wait()
        # On a new machine this file would not exist.
        (self._directory / "ray_current_cluster").unlink(missing_ok=True)

    def end_node_of(self, process: psutil.Process) -> None:
        """SIGTERM to the `ray start --block` that started a process, until it has ended."""
        above = {one.pid for one in process.parents()}
        (node,) = [one for one in self._processes if one.pid in above]
        node.terminate()
        node.wait(BOUND_S)

    def close(self) -> None:
        for process in self._processes:
            kill_tree(process.pid)
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- processes -----------------------------------------------------------------------------
    def _ray(self, *words: str) -> subprocess.Popen[bytes]:
        """Start one Ray node, until its log reports that it runs."""
        log = self._directory / f"start-{len(self._processes)}.log"
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", *words,
            "--object-store-memory", str(cluster_rig.STORE_BYTES), "--disable-usage-stats",
            "--dashboard-agent-listen-port", "0", "--block",
        ]  # fmt: skip
        for _ in range(ATTEMPTS):
            process = self._spawn(command, log)
            give_up = time.monotonic() + BOUND_S
            while process.poll() is None and time.monotonic() < give_up:
                if "Ray runtime started" in log.read_text():
                    return process
                time.sleep(0.1)  # the log is the only sign
            kill_tree(process.pid)
        raise AssertionError(log.read_text())

    def _start_redis(self) -> str:
        port = free_port()
        words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._spawn(["redis-server", *words], self._directory / "redis.log")
        give_up = time.monotonic() + BOUND_S
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return f"127.0.0.1:{port}"
            time.sleep(0.05)
        raise AssertionError("Redis does not start")

    def _spawn(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        doomed = [*top.children(recursive=True), top]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(doomed, timeout=10)
