"""Facts of this machine, as an agent would report them, for `holdfast plan`.

Owns: reading them without torch. Must not: be used by a running job; its agents report themselves.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from ..protocol.facts import Gpu, NodeFacts

NVIDIA_SMI_TIMEOUT_S = 10.0


def local_facts(slots: int) -> NodeFacts:
    """This machine as a node of the local backend."""
    import psutil

    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    return NodeFacts(
        hostname=socket.gethostname(),
        address="127.0.0.1",
        data_port=0,
        slots=slots,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=_gpus(),
        interfaces=tuple(sorted(up)),
        hcas=_hcas(),
    )


def _hcas() -> tuple[str, ...]:
    found = []
    root = Path("/sys/class/infiniband")
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            layer = (device / "ports/1/link_layer").read_text().strip()
        except OSError:
            layer = ""
        found.append(f"{device.name}:{layer}" if layer else device.name)
    return tuple(found)


def _gpus() -> tuple[Gpu, ...]:
    """By nvidia-smi, which comes with the driver; importing torch to ask takes seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            gpus.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    return tuple(gpus)
