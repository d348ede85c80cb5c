"""Binds a worker to the CPUs of the NUMA node that its GPU is attached to, so that copies between
the two do not cross the link between sockets. What the threads of the process allocate then comes
from that node as well.

Only where the system says which node that is; a set of CPUs that the user or the cluster has chosen
is narrowed and never widened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")


def bind_to(device: torch.device) -> None:
    """Bind the process to CPUs before it starts threads: each thread has a set of its own."""
    place = pci_place(torch.cuda.get_device_properties(device))
    bind(SYSTEM, place, os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus))


def pci_place(properties: Any) -> str:
    """The name of a device below /sys/bus/pci/devices; empty: torch does not say."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    values = [getattr(properties, name, None) for name in names]
    if not all(isinstance(value, int) for value in values):
        return ""
    domain, bus, slot = values
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def bind(
    system: Path, place: str, allowed: set[int], apply: Callable[[Iterable[int]], None]
) -> set[int]:
    """The CPUs that this process is bound to; empty: it is left as it is."""
    cpus = cpus_of(system, place) & allowed if place else set()
    if not cpus or cpus == allowed:
        return set()
    try:
        apply(cpus)
    except OSError as error:
        print(f"holdfast: no NUMA binding: {error.strerror}", file=sys.stderr)
        return set()
    return cpus


def cpus_of(system: Path, place: str) -> set[int]:
    """CPUs of the NUMA node of a PCI device; empty: unknown, as in most virtual machines."""
    try:
        node = int((system / "bus/pci/devices" / place / "numa_node").read_text())
        if node < 0:
            return set()
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        return parse_list(listed)
    except (OSError, ValueError):
        return set()


def parse_list(text: str) -> set[int]:
    """A list of CPUs as the kernel writes it: 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
