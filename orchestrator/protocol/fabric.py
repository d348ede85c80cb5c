"""The network between nodes: the fabric profile, and the settings of NCCL and gloo for it.

Everything follows from the spec and the NodeFacts that the agent reports.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html for NCCL_*; the
aws-ofi-nccl project for EFA (its plugin is called `AWS Libfabric` in all versions).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

import msgspec

from ..api.v1alpha1.workload import Fabric
from .facts import NodeFacts

Profile = Literal["tcp", "roce", "ib", "efa", "nvlink-only"]
Source = Literal["contract", "resources", "fabric", "recovery", "user"]


class Setting(msgspec.Struct, frozen=True):
    """One environment variable of a worker and the reason for its value."""

    name: str
    value: str
    why: str
    source: Source


def choose_profile(fabric: Fabric, facts: NodeFacts, num_nodes: int) -> tuple[Profile, str]:
    """The profile of the fabric and the reason for it."""
    if fabric.profile != "auto":
        return fabric.profile, "set by spec.fabric.profile"
    layers = dict(map(_split_hca, facts.hcas))
    for name, layer in layers.items():
        # EFA devices are called rdmap0s6 or efa_0 and have no link layer.
        if name.startswith(("efa", "rdmap")) or layer == "Unspecified":
            return "efa", f"auto: {facts.hostname} has the EFA device {name}"
    for name, layer in layers.items():
        if layer in ("InfiniBand", ""):
            return "ib", f"auto: {facts.hostname} has the InfiniBand device {name}"
    for name in layers:
        return "roce", f"auto: {facts.hostname} has the RDMA device {name} on Ethernet"
    if num_nodes == 1 and len(facts.gpus) > 1:
        return "nvlink-only", "auto: one node, several GPUs, no RDMA device"
    return "tcp", f"auto: {facts.hostname} has no RDMA device"


def is_loopback(address: str) -> bool:
    """True if an address works on its own machine only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def socket_settings(fabric: Fabric, facts: NodeFacts, *, nccl: bool) -> Iterator[Setting]:
    """The interfaces for sockets, if they are known: with a wrong name the start hangs.

    Without a name gloo binds to the address of the host name, often 127.0.1.1, which peers on other
    nodes cannot reach.
    """
    names, why = _interfaces(fabric, facts)
    if not names:
        return
    yield Setting("GLOO_SOCKET_IFNAME", ",".join(names), why, "fabric")
    if nccl:
        exact = "=" + ",".join(names)
        yield Setting("NCCL_SOCKET_IFNAME", exact, f"{why}; = means exactly", "fabric")


def nccl_settings(
    profile: Profile, why: str, fabric: Fabric, facts: NodeFacts, num_nodes: int
) -> Iterator[Setting]:
    """Settings of NCCL for the fabric. With a profile from the spec, NCCL fails if that network is
    missing; with auto it may fall back."""
    forced = fabric.profile != "auto"
    if profile in ("ib", "roce"):
        yield Setting("NCCL_IB_DISABLE", "0", why, "fabric")
        hcas, chosen = _hcas(profile, fabric, facts)
        if hcas:
            yield Setting("NCCL_IB_HCA", "=" + ",".join(hcas), chosen, "fabric")
        if forced:
            text = f"profile {profile} is set: fail instead of falling back to sockets"
            yield Setting("NCCL_NET", "IB", text, "fabric")
    elif profile == "efa":
        yield Setting("FI_PROVIDER", "efa", f"{why}; libfabric takes this provider only", "fabric")
        if forced:
            text = "profile efa is set: fail if the aws-ofi-nccl plugin is missing"
            yield Setting("NCCL_NET", "AWS Libfabric", text, "fabric")
    elif profile == "tcp":
        yield Setting("NCCL_IB_DISABLE", "1", f"{why}: do not probe for RDMA", "fabric")
        if forced:
            yield Setting("NCCL_NET", "Socket", "profile tcp is set", "fabric")
    else:
        yield Setting("NCCL_IB_DISABLE", "1", f"{why}: traffic stays within the node", "fabric")
        if num_nodes > 1:
            yield Setting("NCCL_MNNVL_ENABLE", "1", "nvlink-only over several nodes", "fabric")


def _interfaces(fabric: Fabric, facts: NodeFacts) -> tuple[tuple[str, ...], str]:
    if fabric.interfaces:
        return fabric.interfaces, "set by spec.fabric.interfaces"
    if facts.address_interface:
        why = f"interface of {facts.address}, the address of this node for its peers"
        return (facts.address_interface,), why
    if is_loopback(facts.address):
        return ("lo",), f"all nodes are on this machine ({facts.address})"
    return (), ""


def _hcas(profile: Profile, fabric: Fabric, facts: NodeFacts) -> tuple[tuple[str, ...], str]:
    if fabric.hcas:
        return fabric.hcas, "set by spec.fabric.hcas"
    wanted = "InfiniBand" if profile == "ib" else "Ethernet"
    devices = [name for name, layer in map(_split_hca, facts.hcas) if layer == wanted]
    # If all have one link layer, NCCL's own choice by PCI distance is better.
    if not devices or len(devices) == len(facts.hcas):
        return (), ""
    return tuple(devices), f"the devices of this node whose link layer is {wanted}"


def _split_hca(text: str) -> tuple[str, str]:
    name, _, layer = text.partition(":")
    return name, layer
