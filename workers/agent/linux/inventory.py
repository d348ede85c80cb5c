"""The hardware of this node: cores, memory, GPUs, network.

No device is opened: a CUDA context in the agent would hold device memory that belongs to workers.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import psutil

from holdfast.orchestrator.protocol import cgroup
from holdfast.orchestrator.protocol.environment import CACHE_VARIABLE, VISIBLE_DEVICES, chosen_cache
from holdfast.orchestrator.protocol.facts import Gpu, NetworkInterface, NodeFacts
from holdfast.orchestrator.protocol.hardware import (
    cpus,
    memory_bytes,
    processor,
    query_gpus,
    rdma_devices,
)

SYS_NET = Path("/sys/class/net")
LINK_TYPES = ("1", "32")
"""ARPHRD_ETHER and ARPHRD_INFINIBAND of linux/if_arp.h; tun, WireGuard, IP in IP have others."""
VIRTUAL = ("bridge", "vxlan", "geneve")
"""Kinds of Ethernet interfaces, as their drivers call them in `uevent`."""


def node_facts(*, slots: int, address: str, data_port: int, failure_domain: str) -> NodeFacts:
    found = gpus()
    return NodeFacts(
        hostname=socket.gethostname(),
        address=address,
        data_port=data_port,
        slots=slots,
        cpus=cpus(),
        processor=processor(),
        memory_bytes=memory_bytes(),
        gpus=found,
        visible_devices=visible_devices(os.environ.get(VISIBLE_DEVICES), found),
        nics=nics(address),
        address_interface=interface_of(address),
        hcas=rdma_devices(),
        failure_domain=failure_domain,
        torch_version=_torch_version(),
        pid=os.getpid(),
        cache_directory=cache_directory(),
    )


def cache_directory() -> str:
    """Where compilers keep what they produce; empty: where they do by themselves."""
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
    """Of hardware.memory_bytes(): what is free now, or could be."""
    left = cgroup.memory_available_bytes(cgroup.find("memory"))
    available = psutil.virtual_memory().available
    return available if left is None else min(available, left)


def nics(address: str) -> tuple[NetworkInterface, ...]:
    """The network interfaces that may carry traffic to other machines: those that are up, without
    loopback, bridges of containers, and tunnels, whose packets another interface sends. One of
    these with this address is the way to the other nodes nevertheless."""
    stats, found = psutil.net_if_stats(), []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        here = tuple(filter(None, (_in_network(one.address, one.netmask) for one in entries)))
        if here and (not _is_virtual(SYS_NET / name) or name == interface_of(address)):
            found.append(NetworkInterface(name, here, stats[name].speed))
    return tuple(found)


def _is_virtual(interface: Path) -> bool:
    """A bridge or tunnel, by its directory in /sys/class/net. A pod's veth is none."""
    try:
        kind = (interface / "type").read_text().strip()
        event = (interface / "uevent").read_text().split()
    except OSError:  # it has just been removed
        return True
    return kind not in LINK_TYPES or any(f"DEVTYPE={name}" in event for name in VIRTUAL)


def _in_network(address: str, netmask: str | None) -> str:
    """An address with the length of its prefix; empty for those of this machine or link only, and
    for addresses of hardware."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
        mask = ipaddress.ip_address(netmask or "")
    except ValueError:
        return ""
    if ip.is_loopback or ip.is_link_local:
        return ""
    return f"{ip}/{int(mask).bit_count()}"


def gpus() -> tuple[Gpu, ...]:
    try:
        found = query_gpus()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi: {error}; this node is taken as one without GPUs", file=sys.stderr)
        return ()
    return found[: num_visible(os.environ.get(VISIBLE_DEVICES), len(found))]


def num_visible(variable: str | None, found: int) -> int:
    """Number of GPUs that a value of CUDA_VISIBLE_DEVICES leaves."""
    return found if variable is None else len(_names(variable))


def visible_devices(variable: str | None, found: tuple[Gpu, ...]) -> tuple[str, ...]:
    """The names that the variable gives; without it those that the driver gives parts of GPUs."""
    if variable is not None:
        return _names(variable)
    names = tuple(gpu.device for gpu in found)
    return names if all(names) else ()


def _names(variable: str | None) -> tuple[str, ...]:
    return tuple(name for part in (variable or "").split(",") if (name := part.strip()))


def interface_of(address: str) -> str:
    """The interface of an IP address; empty for an unknown address or a host name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
