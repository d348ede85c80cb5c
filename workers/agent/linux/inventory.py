"""The hardware of this node: cores, memory, GPUs, network.

No device is opened: a CUDA context in the agent would hold device memory that belongs to workers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from holdfast.orchestrator.protocol import cgroup
from holdfast.orchestrator.protocol.environment import (
    CACHE_VARIABLE,
    VISIBLE_DEVICES,
    chosen_cache,
    names_in,
)
from holdfast.orchestrator.protocol.facts import Gpu, NodeFacts
from holdfast.orchestrator.protocol.hardware import (
    cpus,
    memory_bytes,
    processor,
    query_gpus,
    rdma_devices,
)


def node_facts(*, slots: int, address: str, data_port: int, failure_domain: str) -> NodeFacts:
    devices = gpus()
    return NodeFacts(
        hostname=socket.gethostname(),
        address=address,
        data_port=data_port,
        slots=slots,
        cpus=cpus(),
        processor=processor(),
        memory_bytes=memory_bytes(),
        gpus=devices,
        visible_devices=visible_devices(os.environ.get(VISIBLE_DEVICES), devices),
        address_interface=interface_of(address),
        hcas=rdma_devices(),
        failure_domain=failure_domain,
        pid=os.getpid(),
        cache_directory=cache_directory(),
    )


def cache_directory() -> str:
    """Directory of what compilers produce; empty: their own choice."""
    chosen = chosen_cache(os.environ)
    if not chosen:
        return ""
    try:
        Path(chosen).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            return chosen
    except OSError as error:
        got = f"{CACHE_VARIABLE}: {chosen} cannot be written ({error.strerror})"
        print(f"{got}; what compilers produce is kept where they do by default", file=sys.stderr)
        return ""


def available_bytes() -> int:
    """The part of hardware.memory_bytes() that is free now, or could be."""
    left = cgroup.memory_available_bytes(cgroup.find("memory"))
    available = psutil.virtual_memory().available
    return available if left is None else min(available, left)


def gpus() -> tuple[Gpu, ...]:
    try:
        devices = query_gpus()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}; this node is taken as one without GPUs", file=sys.stderr)
        return ()
    return devices[: num_visible(os.environ.get(VISIBLE_DEVICES), len(devices))]


def num_visible(variable: str | None, found: int) -> int:
    """Number of GPUs that a value of CUDA_VISIBLE_DEVICES leaves."""
    return found if variable is None else len(names_in(variable))


def visible_devices(variable: str | None, found: tuple[Gpu, ...]) -> tuple[str, ...]:
    """The names that the variable gives; without it those that the driver gives parts of GPUs."""
    if variable is not None:
        return names_in(variable)
    names = tuple(gpu.device for gpu in found)
    return names if all(names) else ()


def interface_of(address: str) -> str:
    """The interface of an IP address; empty for an unknown address or a host name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address_info.address.partition("%")[0] == address for address_info in addresses):
            return name
    return ""
