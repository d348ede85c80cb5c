"""GPUs of this machine for the nodes of a job, from the driver and from the user."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping
from holdfast.orchestrator.backends import devices
from holdfast.orchestrator.backends.base import NoRoom
from holdfast.orchestrator.backends.local import LocalBackend, LocalPaths, node_limit
from holdfast.orchestrator.cli.targets.local import _check_size
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.protocol.facts import Gpu
from holdfast.workers.agent.linux.inventory import num_visible
from tests.unit.runtime.harness import make_job

SMI = """#!/bin/sh
echo "NVIDIA H100 80GB HBM3, 81559"
echo "NVIDIA H100 80GB HBM3, 81559"
echo "NVIDIA H100 80GB HBM3, 81559"
"""


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices.gpus.cache_clear()
    yield
    devices.gpus.cache_clear()


def job(gpu: int | str = 1, **more: Any) -> TrainingJob:
    return make_job(resources={"gpu": gpu}, **more)


def test_gpus_are_listed_by_the_driver(three_gpus: None) -> None:
    assert devices.gpus() == (Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20),) * 3
    assert devices.gpu_names(job()) == ("0", "1", "2")
    assert node_limit(job()) == 1, "of two workers"


@pytest.mark.parametrize(
    ("visible", "left"), [("2,GPU-8a, 5", ("2", "GPU-8a", "5")), ("", ()), ("MIG-1", ("MIG-1",))]
)
def test_cuda_visible_devices_limits_the_gpus(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str, left: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpu_names(job()) == left
    assert num_visible(visible, 3) == len(left)


MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
"""


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("Enabled", ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
                     "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")),
        ("Disabled", ("0",)),
        ("[N/A]", ("0",)),
    ],
)  # fmt: skip
def test_parts_of_a_gpu_are_devices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, names: tuple[str, ...]
) -> None:
    (tmp_path / "list").write_text(MIG_LIST)
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -L ]; then while read l; do echo "$l"; done < {tmp_path}/list\n'
        f'else echo "NVIDIA A100-SXM4-40GB, 40960, {mode}"; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices.gpus.cache_clear()
    assert devices.gpu_names(job()) == names
    if mode == "Enabled":
        assert [gpu.memory_bytes for gpu in devices.gpus()] == [20 * 10**9, 5 * 10**9]
    devices.gpus.cache_clear()


def test_no_gpus_are_assigned_if_the_job_needs_none_or_names_them(three_gpus: None) -> None:
    assert devices.gpu_names(job(gpu=0)) is None
    assert devices.gpu_names(job(env={"CUDA_VISIBLE_DEVICES": "1"})) is None


def test_no_gpus_are_assigned_if_the_driver_cannot_list_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices.gpus.cache_clear()
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(devices, "DEVICE_DIRECTORY", tmp_path)
    assert devices.gpu_names(job()) is None and node_limit(job()) > 1
    devices.gpus.cache_clear()


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "DEVICE_DIRECTORY", tmp_path)
    devices.gpus.cache_clear()
    yield
    devices.gpus.cache_clear()


def test_a_machine_without_a_driver_has_no_gpu(no_gpu: None) -> None:
    assert devices.gpu_names(job()) == () and node_limit(job()) == 0


def test_a_machine_that_lost_its_gpus_has_no_capacity_for_a_node(
    no_gpu: None, tmp_path: Path
) -> None:
    names = ("nodes", "socket", "token", "endpoint", "logs")
    backend = LocalBackend(job(), LocalPaths(tmp_path, *(tmp_path / name for name in names)))
    with pytest.raises(NoRoom, match="a node needs 2 GPUs; this machine has 0 that can be used"):
        asyncio.run(backend.request_nodes(1, ()))


def test_a_job_for_gpus_is_refused_where_there_are_none(no_gpu: None) -> None:
    with pytest.raises(SpecError, match=r"spec.resources.gpu: got 1; expected 0 on this machine"):
        _check_size(job())


def test_auto_counts_what_this_machine_has(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.found_here(job("auto")) == (3, "this machine has 3 GPUs", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices.found_here(job("auto")) == (1, "CUDA_VISIBLE_DEVICES leaves 1 GPU", False)
    named = job("auto", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert devices.found_here(named).most == 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "_torch_build", lambda: "2.11.0+cpu")
    assert devices.found_here(job("auto")).most == 0
    assert "torch is a build for CPUs" in devices.found_here(job("auto")).what


def test_auto_names_a_gpu_that_is_not_counted(no_gpu: None, tmp_path: Path) -> None:
    assert devices.found_here(job("auto")).most == 0
    (tmp_path / "kfd").touch()
    assert "write gpu: 1 if torch can use it" in devices.found_here(job("auto")).what


def test_nodes_of_workers_with_several_gpus_get_all_of_them(three_gpus: None) -> None:
    script = {"script": "train.py"}
    assert devices.gpus_per_node(job(2, entrypoint=script)) == 4
    assert node_limit(job(2, entrypoint=script)) == 0
    assert node_limit(job(3, entrypoint=script, workersPerNode=1, parallelism={})) == 1


def test_more_nodes_than_there_are_gpus_for_are_refused(three_gpus: None, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_to_mapping(job())))
    words = [sys.executable, "-m", "holdfast.orchestrator.cli.main", "run", str(file)]
    words += ["--home", str(tmp_path / "home")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert (
        "spec.nodes.max: got 2 including spares; expected at most 1 nodes of 2 workers"
        in done.stderr
    )
    assert "which has 3 usable GPUs" in done.stderr
