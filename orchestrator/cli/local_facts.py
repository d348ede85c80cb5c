"""Facts of this machine, as an agent would report them, for `holdfast plan`.

Owns: reading them without torch. Must not: be used by a running job; its agents report themselves.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..backends.local.devices import gpus
from ..protocol.facts import NodeFacts


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
        gpus=gpus(),
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
