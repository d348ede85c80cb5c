"""Variables and fields that do something else than expected are named with what to write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.api.v1alpha1.variables import INEFFECTIVE
from holdfast.orchestrator.planner.gpus import with_gpus

HEADERS = ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp", "FlightRecorderDetail.hpp", "Utils.hpp")


def job(**spec: Any) -> TrainingJob:
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "a"}}
    return job_from_mapping({**head, "spec": {"entrypoint": {"script": "train.py"}, **spec}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NCCL_TIMEOUT", "neither torch nor NCCL reads it; write spec.recovery.hangTimeoutSeconds"),
        ("NCCL_BLOCKING_WAIT", "write TORCH_NCCL_BLOCKING_WAIT"),
        ("NCCL_ASYNC_ERROR_HANDLING", "write TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NODE_RANK", "scripts read GROUP_RANK"),
        ("PET_NNODES", "options of torchrun"),
    ],
)
def test_a_variable_without_the_expected_effect_is_named_with_what_to_write(
    name: str, words: str
) -> None:
    (remark,) = remarks(job(env={name: "1", "MY_FLAG": "x", "NCCL_DEBUG": "INFO"}))
    assert remark.startswith(f"spec.env.{name}: ") and words in remark


def test_settings_of_nccl_have_no_effect_without_gpus() -> None:
    given = job(env={"NCCL_DEBUG": "INFO", "TORCH_NCCL_NAN_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert remarks(given) == [], "gpu: auto is not decided yet"
    (remark,) = remarks(with_gpus(given, 0))
    assert "no process reads NCCL_DEBUG, TORCH_NCCL_NAN_CHECK: workers without GPUs" in remark
    assert remarks(with_gpus(given, 1)) == []


def test_several_gpus_of_one_worker_are_pointed_out() -> None:
    (remark,) = remarks(job(workersPerNode=2, resources={"gpu": 4}))
    assert "4 GPUs for each worker, 8 for a node" in remark
    assert "write workersPerNode: 8 and gpu: 1" in remark


def test_the_table_agrees_with_the_names_that_this_torch_reads() -> None:
    """Old names stand in its headers behind the new one."""
    torch = pytest.importorskip("torch")
    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = "".join((folder / name).read_text() for name in HEADERS if (folder / name).exists())
    known = dict.fromkeys(re.findall(r"\"((?:TORCH_)?(?:NCCL|FR)_[A-Z_]+)\"", text))
    if not known:
        pytest.skip("this torch comes without headers")
    assert "NCCL_TIMEOUT" not in known and "TORCH_NCCL_TIMEOUT" not in known
    for old, new in re.findall(r"\{\s*\"([A-Z_]+)\",\s*\"([A-Z_]+)\"\}", text):
        if new in INEFFECTIVE:
            assert INEFFECTIVE[new].instead == old
