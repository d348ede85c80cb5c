"""Waits of the host in a step of the recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session import shards
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import RankEnv
from holdfast.workers.training import loop
from holdfast.workers.training.recipes import pretrain
from tests.documents import job_document

JOB = job_document(
    "job",
    {
        "entrypoint": {
            "recipe": {
                "name": "pretrain",
                "config": {
                    "globalBatch": 2,
                    "model": {"dim": 16, "numLayers": 1, "numHeads": 2},
                    "data": {"sequenceLength": 8},
                },
            }
        },
        "nodes": {"min": 1, "max": 1},
    },
)


def trainer() -> pretrain.Trainer:
    job = job_from_mapping(JOB)
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    session = Session(RankEnv(), torch.device("cpu"), Mesh())
    return pretrain.build(job, recipe.config, session)


class CountingScalars:
    """Scalars like a GPU's: the host waits in `value` only."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, scalar: Tensor) -> Tensor:
        self.events.append("copy")
        return scalar.clone()

    def value(self, pending: Tensor) -> float:
        self.events.append("wait")
        return float(pending)


def test_a_device_has_the_optimizers_step_to_do_while_the_host_reads_the_loss() -> None:
    made, events = trainer(), list[str]()
    made.parallel.scalars = CountingScalars(events)
    made.optimizer.register_step_pre_hook(lambda *_: events.append("optimizer"))
    loss, norm = loop.train_step(made, 0)
    assert events == ["copy", "copy", "optimizer", "wait", "wait"]
    assert (loss, norm) == loop.train_step(trainer(), 0), "the same numbers as without"


def test_a_norm_that_is_not_finite_ends_the_step_before_it_is_reported() -> None:
    made = trainer()
    with torch.no_grad():
        next(iter(made.parallel.model.parameters())).fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the gradient norm is nan, the loss nan"):
        loop.train_step(made, 0)


def test_a_clipped_step_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from memory that is not page-locked waits for everything that the device has to do."""
    made, copied = trainer(), list[Any]()
    real = torch.tensor

    def counted(*values: Any, **options: Any) -> Tensor:
        copied.append(values)
        return real(*values, **options)

    loop.train_step(made, 0)
    monkeypatch.setattr(shards.torch, "tensor", counted)
    for parameter in made.parallel.shards.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.parallel.shards.clip_grad_norm_(1.0)
    assert not copied
