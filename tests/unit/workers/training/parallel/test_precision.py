"""float16: all ranks skip the same steps, a skipped step is printed, and the scale is state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.session.shards import Shards
from holdfast.workers.training.loop import train_step
from holdfast.workers.training.parallel.precision import LossScale

from .recorded import job_of, rank_of


def test_an_overflow_halves_the_scale_and_many_good_steps_double_it() -> None:
    scale = LossScale()
    first = scale.value
    assert not scale.update(math.inf)
    assert scale.value == first / 2
    for _ in range(2000):
        assert scale.update(1.0)
    assert scale.value == first
    assert not scale.update(math.nan)


def test_gradients_that_are_not_finite_without_a_scale_are_an_error() -> None:
    scale = LossScale()
    while scale.value > 1:
        assert not scale.update(math.inf)
    with pytest.raises(FloatingPointError, match="nan with a loss scale of 1"):
        scale.update(math.nan)


def test_the_scale_continues_from_a_checkpoint_and_begins_without_one() -> None:
    scale, other = LossScale(), LossScale()
    scale.update(math.inf)
    scale.update(1.0)
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict() == {"loss_scale": 2.0**15, "good_steps": 1}
    other.load_state_dict({})
    assert other.value == LossScale().value


def test_scaled_gradients_are_divided_by_the_scale_and_clipped_as_usual() -> None:
    for max_norm, expected in ((0.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        model = nn.Linear(2, 1, bias=False)
        model.weight.grad = torch.tensor([[3.0, 4.0]]) * 1024
        shards = Shards(model, torch.device("cpu"), 1)
        _, norm = shards.reduce_and_clip(torch.zeros(()), max_norm, 1024.0)
        assert float(norm) == pytest.approx(5.0)
        assert model.weight.grad.flatten().tolist() == pytest.approx(expected, rel=1e-4)


def test_a_step_that_overflows_changes_no_weight_and_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_of({"precision": {"parameters": "float16"}}, workers=1)
    with rank_of(job, Mesh()) as trainer:
        trainer.parallel.refuse_non_finite = True
        scale = trainer.parallel.loss_scale
        assert scale is not None
        scale.value = 2.0**40
        before = [p.detach().clone() for p in trainer.parallel.shards.parameters()]
        train_step(trainer, 0)
        after = list(trainer.parallel.shards.parameters())
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert not trainer.optimizer.state
        assert "step 0 changes nothing: the gradients overflow float16" in capsys.readouterr().out
        scale.value = 2.0**16
        train_step(trainer, 1)
        assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert "changes nothing" not in capsys.readouterr().out
