"""The network of a run: a bridge in this machine's namespace and one veth pair for each node.

Device names begin with `hf` and the name of the run. The network is flat, without routing and
address translation, and nothing leaves the machine: no device of the machine is in the bridge, and
ip_forward is not changed.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess

BRIDGE_ADDRESS = 1  # also the address of the `kubernetes` Service
SECOND_OCTETS = range(213, 250)


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def bridge_name(run: str) -> str:
    return f"hfb{run}"


def link_name(run: str, index: int) -> str:
    """This machine's end of a node's veth pair."""
    return f"hfv{run}n{index}"


class Network:
    """A /16 in which 10.x.0.1 is this machine and 10.x.i.1 is node i; its pods follow."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.subnet = free_subnet()
        self.address = str(self.subnet.network_address + BRIDGE_ADDRESS)
        bridge = bridge_name(run)
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/{self.subnet.prefixlen}", "dev", bridge)
        ip("link", "set", bridge, "up")

    @property
    def services(self) -> str:
        """The range of Services contains the bridge, so that `kubernetes` is the API server."""
        return f"{self.subnet.network_address}/24"

    def node_address(self, index: int) -> str:
        return str(self.subnet.network_address + 256 * index + 1)

    def pod_range(self, index: int) -> tuple[str, str]:
        start = self.subnet.network_address + 256 * index
        return str(start + 10), str(start + 250)

    def plug(self, index: int, pid: int) -> None:
        """Create the veth pair of a process's network namespace, which sees it as eth0."""
        link = link_name(self.run, index)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", link, "master", bridge_name(self.run))
        ip("link", "set", link, "up")

    def cut(self, index: int) -> None:
        """Drop all packets in both directions; no connection is closed."""
        ip("link", "set", link_name(self.run, index), "down")

    def heal(self, index: int) -> None:
        ip("link", "set", link_name(self.run, index), "up")

    def unplug(self, index: int) -> None:
        delete(self.run, link_name(self.run, index))


def free_subnet() -> ipaddress.IPv4Network:
    """A private /16 that no address or route of this machine touches."""
    routes = json.loads(ip("-json", "-4", "route", "show", "table", "all"))
    used = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in routes
        if route.get("dst", "default") != "default"
    ]
    for octet in SECOND_OCTETS:
        subnet = ipaddress.IPv4Network(f"10.{octet}.0.0/16")
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise RuntimeError(f"every network from 10.{SECOND_OCTETS[0]}.0.0/16 on is in use")


def of_run(run: str) -> list[str]:
    if shutil.which("ip") is None:
        return []
    names = [link["ifname"] for link in json.loads(ip("-json", "link", "show") or "[]")]
    return [n for n in names if n == bridge_name(run) or n.startswith(link_name(run, 0)[:-1])]


def remove(run: str) -> None:
    for device in of_run(run):
        delete(run, device)


def delete(run: str, device: str) -> None:
    try:
        ip("link", "del", device)
    except RuntimeError:
        # A namespace that is just ending removes its end of the pair, and so the other one.
        if device in of_run(run):
            raise
