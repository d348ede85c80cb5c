"""Standbys with a CUDA context: for which jobs, and what a failure does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.workers.agent.pool.gpu_context import _make, open_context


def job(gpu: int = 1, *, standbys: bool = True, **env: str) -> TrainingJob:
    spec: dict[str, Any] = {
        "entrypoint": {"script": "train.py"},
        "resources": {"gpu": gpu},
        "recovery": {"gpuStandbys": standbys},
        "env": env,
    }
    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "j"}}
    return job_from_mapping({**head, "spec": spec})


@pytest.mark.parametrize(
    ("given", "local_rank", "opened"),
    [
        (job(), 2, [2]),
        (job(standbys=False), 2, []),
        (job(gpu=0), 2, []),
        (job(gpu=2), 2, []),  # its devices come with the rank
        (job(CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"), 0, []),
        (job(), -1, []),  # not a standby
    ],
)
def test_the_context_of_the_likely_gpu_is_opened(
    given: TrainingJob, local_rank: int, opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    got: list[int] = []
    assert open_context(given, local_rank, got.append) == bool(opened)
    assert got == opened


def test_a_failure_is_printed_and_the_standby_lives(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    assert not open_context(job(), 0, fail)
    assert "this standby has no CUDA context: CUDA error: out of memory" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_context_is_opened_on_a_gpu() -> None:
    _make(0)
    assert torch.cuda.is_initialized()
