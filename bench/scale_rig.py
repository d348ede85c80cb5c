"""A control plane with fake nodes and an operator process, and readings of them: CPU, memory,
threads, requests, and the response time of /healthz.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes import request_counts
from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig import fake_nodes
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.run import Run

JOBS_NAMESPACE = "scale"
PROBE_EVERY_S = 0.02
SETTINGS = replace(
    fake_nodes.SETTINGS,
    # By default the scheduler may send 50 requests a second and the controller-manager 20, and it
    # would be these that are measured.
    scheduler=("--kube-api-qps=1000", "--kube-api-burst=2000"),
    controller_manager=(
        *fake_nodes.SETTINGS.controller_manager,
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
    ),
    go_memory="4GiB",
)


class Busy(Exception):
    """The API server did not answer within seconds; it may the next time."""


@dataclass
class Reading:
    """The reading of one moment."""

    at_s: float
    cpu_s: dict[str, float]
    """Process -> CPU-seconds so far."""
    resident_mib: float
    """Memory of the operator, like all fields that follow."""
    peak_mib: float
    num_threads: int
    num_files: int
    by_server: int
    by_operator: request_counts.Requests


@dataclass
class Scale:
    """Size of the job that is measured."""

    plane: ControlPlane
    replica: Replica
    delays_ms: list[float] = field(default_factory=list)

    def read(self) -> Reading:
        assert self.replica.process is not None
        pids = {
            "operator": self.replica.process.pid,
            "API server": self.plane.api_server.pid,
            "etcd": self.plane.etcd.pid,
            "scheduler": self.plane.scheduler.pid,
            "controller-manager": self.plane.controller_manager.pid,
        }
        # Before the pages are asked for, which costs CPU too.
        cpu_s = {name: _cpu_s(psutil.Process(pid)) for name, pid in pids.items()}
        operator = psutil.Process(pids["operator"])
        at_s = time.monotonic()
        return Reading(
            at_s=at_s,
            cpu_s=cpu_s,
            resident_mib=operator.memory_info().rss / 2**20,
            peak_mib=_peak_mib(operator.pid),
            num_threads=operator.num_threads(),
            num_files=operator.num_fds(),
            by_server=request_counts.counted_by_server(self.plane),
            by_operator=request_counts.counted_by_operator(self.replica),
        )

    def count(self, what: str, query: str = "") -> int:
        """Objects of the jobs' namespace, without listing them; raises Busy."""
        text = self.plane.request(f"{path_of(what)}?limit=1{query}")
        if text is None:
            raise Busy(what)
        page = json.loads(text)
        return len(page.get("items", ())) + int(page["metadata"].get("remainingItemCount", 0))

    @contextmanager
    def probing(self) -> Iterator[list[float]]:
        """Milliseconds of each answer of /healthz, which comes from the event loop itself."""
        delays: list[float] = []
        stop = threading.Event()
        thread = threading.Thread(target=_probe, args=(self.replica.port, delays, stop))
        thread.start()
        try:
            yield delays
        finally:
            stop.set()
            thread.join()


def path_of(what: str) -> str:
    if what == "trainingjobs":
        return f"/apis/holdfast.dev/v1alpha1/namespaces/{JOBS_NAMESPACE}/{what}"
    return f"/api/v1/namespaces/{JOBS_NAMESPACE}/{what}"


def _probe(port: int, delays: list[float], stop: threading.Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not stop.wait(PROBE_EVERY_S):
        began_s = time.monotonic()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        delays.append((time.monotonic() - began_s) * 1000)
    connection.close()


def _cpu_s(process: psutil.Process) -> float:
    times: Any = process.cpu_times()
    return float(times.user + times.system)


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux says it of every process")


@contextmanager
def scale(num_nodes: int) -> Iterator[Scale]:
    """Removed in the end. The operator has the default lease and looks after one namespace."""
    with Run() as run:
        plane = ControlPlane(run, programs.locate(), settings=SETTINGS)
        plane.start()
        kubectl = plane.kubectl()
        kubectl.run("create", "namespace", JOBS_NAMESPACE)
        kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
        kubectl.served(NAME)
        fake_nodes.add(kubectl, num_nodes)
        kubeconfig = request_counts.operator_kubeconfig(plane)
        replica = Replica(kubeconfig, run.directory, (JOBS_NAMESPACE,), "--lease-seconds=10")
        replica.start()
        assert replica.process is not None
        run.record("operator", replica.process.pid)
        try:
            replica.wait_leading()
            yield Scale(plane, replica)
        finally:
            replica.close()
