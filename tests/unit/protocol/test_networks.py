"""Which interfaces the sockets of a job use: those in networks that all its nodes share."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.protocol.environment import explain_environment
from holdfast.orchestrator.protocol.fabric import socket_networks
from holdfast.orchestrator.protocol.facts import Gpu, NetworkInterface, NodeFacts, WorkerSeat
from holdfast.orchestrator.protocol.networks import OWN, interfaces_in, shared_networks

from .test_environment import MEMBERSHIP, make_job


def nic(name: str, *addresses: str, speed: int = 0) -> NetworkInterface:
    return NetworkInterface(name, addresses, speed)


def node(*nics: NetworkInterface, own: str = "", **more: Any) -> NodeFacts:
    """Its address is the first one of its first interface, or of `own`."""
    first = next((one for one in nics if one.name == own), nics[0])
    given = {"hostname": "h", "data_port": 1, "slots": 2, "cpus": 8, **more}
    address = first.addresses[0].partition("/")[0]
    return NodeFacts(address=address, address_interface=first.name, nics=nics, **given)


def eight(host: int, **more: Any) -> NodeFacts:
    return node(*(nic(f"ens{i}", f"10.0.{i}.{host}/24", speed=100_000) for i in range(8)), **more)


def names(*nodes: NodeFacts) -> list[tuple[str, ...]]:
    networks = shared_networks(nodes)
    return [interfaces_in(one, networks) for one in nodes]


def test_nodes_with_one_interface_each_use_that_of_their_address() -> None:
    pods = [node(nic("eth0", f"10.1.{host}.2/24")) for host in (1, 2)]
    assert shared_networks(pods) == ()
    assert shared_networks([node(nic("eth0", f"10.1.1.{host}/24")) for host in (1, 2)]) == ()


def test_eight_interfaces_in_shared_networks_are_all_used_that_of_the_address_first() -> None:
    nodes = [eight(host, own="ens3") for host in (1, 2, 3)]
    assert shared_networks(nodes) == (OWN, *(f"10.0.{i}.0/24" for i in (0, 1, 2, 4, 5, 6, 7)))
    assert set(names(*nodes)) == {("ens3", *(f"ens{i}" for i in (0, 1, 2, 4, 5, 6, 7)))}


def test_interfaces_of_one_network_count_as_often_as_every_node_has_them() -> None:
    many = node(*(nic(f"ens{i}", f"10.0.0.{i + 1}/24") for i in range(4)))
    few = node(*(nic(f"eth{i}", f"10.0.0.{i + 11}/24") for i in range(3)))
    assert names(many, few) == [("ens0", "ens1", "ens2"), ("eth0", "eth1", "eth2")]


def test_only_networks_of_all_nodes_are_used() -> None:
    """And in one order, because gloo connects the n-th interfaces of all ranks."""
    one = node(nic("a0", "10.0.0.1/24"), nic("a1", "10.0.2.1/24"), nic("a2", "10.0.1.1/24"))
    two = node(nic("b0", "10.0.0.2/24"), nic("b1", "10.0.1.2/24"), nic("b2", "10.0.9.2/24"))
    assert names(one, two) == [("a0", "a2"), ("b0", "b1")]


@pytest.mark.parametrize("address", ["172.17.0.1/16", "192.168.122.1/24", "fd00:17::1/64"])
def test_a_network_with_the_same_address_on_two_hosts_is_within_each_of_them(address: str) -> None:
    nodes = [node(nic("ens5", f"10.0.0.{host}/24"), nic("docker0", address)) for host in (1, 2)]
    assert shared_networks(nodes) == ()


def test_two_nodes_of_one_host_do_not_hide_its_networks() -> None:
    assert names(eight(1), eight(1), eight(2))[0] == tuple(f"ens{i}" for i in range(8))
    assert shared_networks([eight(1), eight(1)]) == (), "they reach each other within the host"


def test_nodes_with_ipv6_only_share_its_networks() -> None:
    nodes = [
        node(nic("ens5", f"fd00:5::{host}/64"), nic("ens6", f"fd00:6::{host}/64"))
        for host in (1, 2)
    ]
    assert shared_networks(nodes) == (OWN, "fd00:6::/64")


def test_an_interface_with_two_addresses_is_named_once() -> None:
    nodes = [
        node(
            nic("ens5", f"10.0.5.{host}/24", f"fd00:5::{host}/64"),
            nic("ens6", f"10.0.6.{host}/24", f"fd00:6::{host}/64"),
        )
        for host in (1, 2)
    ]
    assert names(*nodes) == [("ens5", "ens6")] * 2


def test_networks_between_hosts_are_found_beside_addresses_without_a_common_network() -> None:
    """Some networks of pods route single addresses; a second one (Multus) is shared."""
    nodes = [
        node(nic("eth0", f"10.4.4.{host}/32"), nic("net1", f"10.56.0.{host}/16")) for host in (1, 2)
    ]
    assert names(*nodes) == [("eth0", "net1")] * 2


def test_an_interface_much_slower_than_the_others_is_left_out() -> None:
    def host(number: int, management: int) -> NodeFacts:
        fast = [nic(f"ens{i}", f"10.0.{i}.{number}/24", speed=100_000) for i in (1, 2)]
        return node(nic("eno1", f"10.9.0.{number}/24", speed=management), *fast)

    assert names(host(1, 1_000), host(2, 100_000)) == [("ens1", "ens2")] * 2
    assert names(host(1, 50_000), host(2, 100_000)) == [("eno1", "ens1", "ens2")] * 2
    unknown = 0
    assert names(host(1, unknown), host(2, 1_000)) == [("eno1", "ens1", "ens2")] * 2


def test_a_node_whose_address_belongs_to_none_of_its_interfaces_decides_for_all() -> None:
    hidden = msgspec.structs.replace(eight(2), address="203.0.113.9", address_interface="")
    assert shared_networks([eight(1), hidden]) == ()


@pytest.mark.parametrize(
    ("spec", "node_more", "used"),
    [
        pytest.param({}, {}, True, id="cpu"),
        pytest.param({"resources": {"gpu": 1}}, {}, True, id="auto"),
        pytest.param({"resources": {"gpu": 1}}, {"hcas": ("mlx5_0:InfiniBand",)}, False, id="ib"),
        pytest.param(
            {"resources": {"gpu": 1}, "fabric": {"profile": "tcp"}},
            {"hcas": ("mlx5_0:InfiniBand",)},
            True,
            id="tcp",
        ),
        pytest.param({"fabric": {"interfaces": ["ens1"]}}, {}, False, id="named"),
    ],
)
def test_several_interfaces_are_used_where_sockets_carry_the_tensors(
    spec: dict[str, Any], node_more: dict[str, Any], used: bool
) -> None:
    nodes = [eight(1), eight(2, **node_more)]
    assert bool(socket_networks(make_job(**spec), nodes)) is used


def test_nccl_and_gloo_get_all_interfaces_with_the_reason() -> None:
    nodes = [eight(host, gpus=(Gpu("H100", 1),)) for host in (1, 2)]
    job = make_job(resources={"gpu": 1})
    membership = msgspec.structs.replace(MEMBERSHIP, networks=socket_networks(job, nodes))
    seat = WorkerSeat(rank=0, local_rank=0, shard=0, persists=True)
    settings = {s.name: s for s in explain_environment(job, membership, seat, 0, nodes[0])}
    every = ",".join(f"ens{i}" for i in range(8))
    assert settings["NCCL_SOCKET_IFNAME"].value == f"={every}"
    assert settings["GLOO_SOCKET_IFNAME"].value == every
    assert "networks that all nodes share: 10.0.1.0/24, 10.0.2.0/24" in (
        settings["NCCL_SOCKET_IFNAME"].why
    )
    named = make_job(resources={"gpu": 1}, fabric={"interfaces": ["ens7"]})
    settings = {s.name: s for s in explain_environment(named, membership, seat, 0, nodes[0])}
    assert settings["NCCL_SOCKET_IFNAME"].value == "=ens7"


def test_a_slow_interface_of_the_address_is_named_in_the_reason() -> None:
    nodes = []
    for host in (1, 2):
        fast = nic("ens1", f"10.0.1.{host}/24", speed=25_000)
        nodes.append(node(nic("eno1", f"10.9.0.{host}/24", speed=1_000), fast))
    membership = msgspec.structs.replace(MEMBERSHIP, networks=shared_networks(nodes))
    seat = WorkerSeat(rank=0, local_rank=0, shard=0, persists=True)
    settings = {s.name: s for s in explain_environment(make_job(), membership, seat, 0, nodes[0])}
    assert settings["GLOO_SOCKET_IFNAME"].value == "ens1"
    assert "eno1 is less than half as fast" in settings["GLOO_SOCKET_IFNAME"].why


def test_facts_of_an_older_journal_are_read_and_nothing_is_known_of_their_networks() -> None:
    old = {
        "hostname": "a",
        "address": "10.0.0.1",
        "data_port": 1,
        "slots": 2,
        "interfaces": ["ens5", "lo"],
        "address_interface": "ens5",
    }
    facts = msgspec.convert(old, NodeFacts)
    assert facts.nics == () and shared_networks([facts, eight(1)]) == ()
