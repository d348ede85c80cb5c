"""The network interfaces that an agent reports."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from holdfast.orchestrator.protocol.environment import CACHES
from holdfast.orchestrator.protocol.facts import NetworkInterface
from holdfast.workers.agent.linux import inventory


def _at(address: str, netmask: str | None) -> SimpleNamespace:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address, netmask=netmask)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lo, two NICs, a NIC that is down, a tunnel, a bridge of containers and one to the network."""
    addresses = {
        "lo": [_at("127.0.0.1", "255.0.0.0"), _at("::1", "ffff:" * 7 + "ffff")],
        "ens5": [
            _at("10.0.5.1", "255.255.255.0"),
            _at("fd00::5", "ffff:ffff:ffff:ffff::"),
            _at("fe80::1%ens5", "ffff:ffff:ffff:ffff::"),
            _at("02:fc:00:00:00:01", None),
        ],
        "ens6": [_at("10.0.6.1", "255.255.240.0")],
        "ens7": [_at("10.0.7.1", "255.255.255.0")],
        "usb0": [_at("169.254.3.1", "255.255.255.0")],
        "docker0": [_at("172.17.0.1", "255.255.0.0")],
        "wg0": [_at("10.9.0.1", "255.255.255.0")],
        "br0": [_at("10.0.8.1", "255.255.255.0")],
    }
    speeds = {"ens5": 100_000, "ens6": 0}
    stats = {
        name: SimpleNamespace(isup=name != "ens7", speed=speeds.get(name, 10)) for name in addresses
    }
    for name in addresses:
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text("65534\n" if name == "wg0" else "1\n")
        kind = "DEVTYPE=bridge\n" if name in ("docker0", "br0") else ""
        (tmp_path / name / "uevent").write_text(f"{kind}INTERFACE={name}\nIFINDEX=2\n")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(inventory, "SYS_NET", tmp_path)


@pytest.mark.usefixtures("machine")
def test_interfaces_that_reach_other_machines_are_reported_with_networks_and_speed() -> None:
    assert inventory.nics("10.0.5.1") == (
        NetworkInterface("ens5", ("10.0.5.1/24", "fd00::5/64"), 100_000),
        NetworkInterface("ens6", ("10.0.6.1/20",), 0),
    )


@pytest.mark.usefixtures("machine")
def test_a_bridge_with_the_address_of_the_node_is_its_way_out() -> None:
    names = [nic.name for nic in inventory.nics("10.0.8.1")]
    assert names == ["br0", "ens5", "ens6"]
    assert inventory.interface_of("10.0.8.1") == "br0"


def test_a_cache_that_cannot_be_written_is_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CACHES:  # a test before this one may have imported torch._dynamo, which sets one
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert inventory.cache_directory() == str(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", str(tmp_path / "file"))
    assert inventory.cache_directory() == ""
    assert f"HOLDFAST_CACHE_DIR: {tmp_path / 'file'} cannot be written" in capsys.readouterr().err
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert inventory.cache_directory() == ""
    assert capsys.readouterr().err == "", "the user's own choice needs no word"
