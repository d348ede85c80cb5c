"""What this node has: cores, memory, GPUs, network. Read once, without opening a device.

Owns: NodeFacts of this node. Must not: create a CUDA context: the agent would hold device memory
that belongs to the workers.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

from holdfast.orchestrator.protocol.environment import VISIBLE_DEVICES
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts

from . import cgroup

NVIDIA_SMI_TIMEOUT_S = 10.0


def node_facts(*, slots: int, address: str, data_port: int, failure_domain: str) -> NodeFacts:
    return NodeFacts(
        hostname=socket.gethostname(),
        address=address,
        data_port=data_port,
        slots=slots,
        cpus=cpus(),
        memory_bytes=memory_bytes(),
        gpus=gpus(),
        interfaces=interfaces(),
        address_interface=interface_of(address),
        hcas=hcas(),
        failure_domain=failure_domain,
        torch_version=_torch_version(),
        pid=os.getpid(),
    )


def cpus() -> int:
    """Cores that this process may use at once: a quota counts as whole cores."""
    quota = cgroup.cpu_limit(cgroup.find("cpu"))
    there = len(os.sched_getaffinity(0))
    return there if quota is None else max(1, min(there, int(quota)))


def memory_bytes() -> int:
    limit = cgroup.memory_limit_bytes(cgroup.find("memory"))
    there = psutil.virtual_memory().total
    return there if limit is None else min(there, limit)


def interfaces() -> tuple[str, ...]:
    """Network interfaces that are up, loopback last."""
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    return tuple(sorted(up, key=lambda name: (name == "lo", name)))


def gpus() -> tuple[Gpu, ...]:
    """What nvidia-smi lists; nothing where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not Path("/proc/driver/nvidia/gpus").exists():
        return ()
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}; taking this node as one without GPUs", file=sys.stderr)
        return ()
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    found = tuple(Gpu(name.strip(), int(float(mib)) * 2**20) for name, mib in rows)
    return found[: num_visible(os.environ.get(VISIBLE_DEVICES), len(found))]


def num_visible(told: str | None, found: int) -> int:
    """How many of the GPUs that are there CUDA_VISIBLE_DEVICES leaves."""
    return found if told is None else sum(bool(name.strip()) for name in told.split(","))


def interface_of(address: str) -> str:
    """The interface that carries an IP address; empty where none does, or a name was given."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


def hcas() -> tuple[str, ...]:
    """RDMA devices as `name:link layer`, which tells InfiniBand from RoCE and EFA."""
    root = Path("/sys/class/infiniband")
    found = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        layer = device / "ports/1/link_layer"
        found.append(
            f"{device.name}:{layer.read_text().strip()}" if layer.exists() else device.name
        )
    return tuple(found)


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
