"""The interfaces for sockets of nodes that have several: those in networks that all nodes share."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Sequence

from .facts import NetworkInterface, NodeFacts

OWN = "address"
"""In place of a network: the interface of each node's address, which its peers reach."""


def shared_networks(nodes: Iterable[NodeFacts]) -> tuple[str, ...]:
    """One entry for each interface that every node uses for sockets: OWN, or a network as
    `10.0.0.0/24`, once for each interface that all nodes have in it. Empty: that of its address
    only. All nodes keep this order, because gloo connects the n-th interfaces of all ranks.

    A network in which two hosts have the same address is one within each host, as docker0's. An
    interface with less than half the speed of the fastest is left out: gloo and NCCL give each
    the same share, so it would be the slowest that all wait for."""
    hosts = list({node.address: node for node in nodes}.values())
    if len(hosts) < 2 or not all(host.address_interface for host in hosts):
        return ()
    own = [_speed(host.nics, host.address_interface) for host in hosts]
    found = [(OWN, min(own))]
    left = [_others(host) for host in hosts]
    for network in _across(hosts):
        while taken := _take_each(left, network):
            found.append((network, min(nic.mbit_per_s for nic in taken)))
    fastest = max(speed for _, speed in found)
    kept = tuple(network for network, speed in found if not speed or 2 * speed >= fastest)
    return () if kept == (OWN,) else kept


def interfaces_in(facts: NodeFacts, networks: Sequence[str]) -> tuple[str, ...]:
    """The names of this node's interfaces for the entries of shared_networks, in their order."""
    names, left = [], [_others(facts)]
    for network in networks:
        if network == OWN:
            names.append(facts.address_interface)
        elif taken := _take_each(left, network):
            names.append(taken[0].name)
    return tuple(names)


def describe_networks(networks: Sequence[str]) -> str:
    """Such as: 2 interfaces of each node: of its address, in 10.0.2.0/24."""
    names = (f"in {one}" if one != OWN else "of its address" for one in dict.fromkeys(networks))
    count = f"{len(networks)} interface{'s' * (len(networks) > 1)}"
    return f"{count} of each node: {', '.join(names)}"


def _across(hosts: Sequence[NodeFacts]) -> list[str]:
    """The networks in which all hosts have an address, each its own; IPv4 first."""
    addresses: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for host in hosts:
        here = {address for nic in host.nics for address in nic.addresses}
        addresses.update(here)
        members.update({_network(address) for address in here})
    within = {_network(address) for address, count in addresses.items() if count > 1}
    shared = [n for n, count in members.items() if count == len(hosts) and n not in within]
    return sorted(shared, key=lambda text: (":" in text, int(ipaddress.ip_interface(text).ip)))


def _take_each(left: list[list[NetworkInterface]], network: str) -> list[NetworkInterface]:
    """Remove from each list the first interface in a network; nothing unless all have one."""
    found = []
    for nics in left:
        first = next((nic for nic in nics if network in map(_network, nic.addresses)), None)
        if first is None:
            return []
        found.append(first)
    for nics, nic in zip(left, found, strict=True):
        nics.remove(nic)
    return found


def _others(host: NodeFacts) -> list[NetworkInterface]:
    return [nic for nic in host.nics if nic.name != host.address_interface]


def _speed(nics: Iterable[NetworkInterface], name: str) -> int:
    return next((nic.mbit_per_s for nic in nics if nic.name == name), 0)


def _network(address: str) -> str:
    return str(ipaddress.ip_interface(address).network)
