"""Queries the hardware of this machine without opening a device."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .facts import Gpu

NVIDIA_SMI_TIMEOUT_S = 10.0


def query_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; it comes with the driver, and importing torch to ask takes
    seconds. Empty without nvidia-smi. Raises OSError or subprocess.SubprocessError if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
    )
    found = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            found.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    return tuple(found)


def rdma_devices() -> tuple[str, ...]:
    """RDMA devices as `name:link layer`; the link layer distinguishes InfiniBand, RoCE and EFA."""
    root = Path("/sys/class/infiniband")
    found = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            layer = (device / "ports/1/link_layer").read_text().strip()
        except OSError:
            layer = ""
        found.append(f"{device.name}:{layer}" if layer else device.name)
    return tuple(found)
