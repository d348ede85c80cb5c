"""Two hosts with two interfaces each, as network namespaces of this machine: what the agents
report, what the rule chooses, and that gloo sends over both interfaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.protocol.environment import worker_environment
from holdfast.orchestrator.protocol.fabric import socket_networks
from holdfast.orchestrator.protocol.facts import Membership, NodeFacts, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh

REPORT = """
import sys, msgspec
from holdfast.workers.agent.linux import inventory
facts = inventory.node_facts(slots=1, address=sys.argv[1], data_port=1, failure_domain="")
print(msgspec.json.encode(facts).decode())
"""
REDUCE = """
import datetime, json, os, pathlib
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
for _ in range(8):
    values = torch.ones(1 << 18)
    dist.all_reduce(values)
    assert values.eq(2).all()
root = pathlib.Path("/sys/class/net")
names = os.environ["GLOO_SOCKET_IFNAME"].split(",")
print(json.dumps({n: int((root / n / "statistics/tx_bytes").read_text()) for n in names}))
dist.destroy_process_group()
"""
HOSTS = (1, 2)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces: eth0 and eth1 of both are connected, docker0 is within each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = [f"holdfast-{os.getpid()}-{host}" for host in HOSTS]
    made = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(name)
        for index in range(2):
            peer = ("peer", "name", f"eth{index}", "netns", names[1])
            _ip("-n", names[0], "link", "add", f"eth{index}", "type", "veth", *peer)
        for host, name in zip(HOSTS, names, strict=True):
            _ip("-n", name, "link", "add", "docker0", "type", "bridge")
            _ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            for index in range(2):
                address = f"10.88.{index}.{host}/24"
                _ip("-n", name, "addr", "add", address, "dev", f"eth{index}")
            for link in ("lo", "eth0", "eth1", "docker0"):
                _ip("-n", name, "link", "set", link, "up")
        for name in names:
            _wait_for_carrier(name)
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)


def _wait_for_carrier(name: str) -> None:
    """The kernel notices that the other end is up a little later, and facts leave out what is
    down. The test's time limit is the bound."""
    down = {"eth0", "eth1"}
    while down:
        found = json.loads(_ip("-n", name, "-json", "link", "show"))
        down -= {link["ifname"] for link in found if link["operstate"] == "UP"}
        time.sleep(0.01)


def _python(host: str, code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **variables},
        stdout=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    """What it printed last. Its failure fails the test."""
    text, _ = process.communicate(timeout=110)
    assert process.returncode == 0
    return text.splitlines()[-1]


def test_two_interfaces_in_shared_networks_carry_the_traffic_of_gloo(hosts: list[str]) -> None:
    nodes = []
    for number, host in zip(HOSTS, hosts, strict=True):
        text = _output(_python(host, REPORT, f"10.88.0.{number}"))
        nodes.append(msgspec.json.decode(text, type=NodeFacts))
    assert [nic.name for nic in nodes[0].nics] == ["eth0", "eth1"], "docker0 is within a host"
    assert nodes[1].nics[1].addresses == ("10.88.1.2/24",)
    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "nics"},
            "spec": {"entrypoint": {"script": "train.py"}, "nodes": {"min": 2, "max": 2}},
        }
    )
    membership = Membership(
        generation=1,
        mesh=Mesh(shard=2),
        num_nodes=2,
        workers_per_node=1,
        master_address=nodes[0].address,
        master_port=29500,
        restart_count=0,
        networks=socket_networks(job, nodes),
    )
    ranks = []
    for rank, (host, facts) in enumerate(zip(hosts, nodes, strict=True)):
        seat = WorkerSeat(rank=rank, local_rank=0, shard=rank, persists=True)
        environment = worker_environment(job, membership, seat, rank, facts)
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0,eth1"
        ranks.append(_python(host, REDUCE, **environment))
    for sent in map(json.loads, map(_output, ranks)):
        assert min(sent["eth0"], sent["eth1"]) > 1 << 20, sent
