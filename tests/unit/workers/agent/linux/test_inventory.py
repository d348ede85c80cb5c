"""The network interface and the cache directory that an agent reports."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from holdfast.orchestrator.protocol.environment import CACHES
from holdfast.workers.agent.linux import inventory


def test_the_interface_of_the_address_may_be_a_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in {"ens5": "10.0.5.1", "br0": "10.0.8.1"}.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert inventory.interface_of("10.0.8.1") == "br0"
    assert inventory.interface_of("10.0.9.1") == ""


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
