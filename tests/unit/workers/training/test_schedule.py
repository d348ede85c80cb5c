"""Learning rates by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.recipe import Optimizer
from holdfast.workers.training.schedule import learning_rate

STEPS = 40


def rates(schedule: str = "cosine", warmup: int = 4, **settings: Any) -> list[float]:
    config = Optimizer.model_validate(
        {"learningRate": 1.0, "warmupSteps": warmup, "learningRateSchedule": {schedule: settings}}
    )
    return [learning_rate(config, step, STEPS) for step in range(STEPS + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_warms_up_and_only_falls_after_it(schedule: str) -> None:
    found = rates(schedule)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert all(before >= after for before, after in pairwise(found[4:]))
    assert found[STEPS] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_cosine_and_linear_are_half_way_in_the_middle_and_cosine_is_flat_at_its_ends() -> None:
    cosine, linear = rates("cosine"), rates("linear")
    middle = 4 + (STEPS - 4) // 2
    assert cosine[middle] == pytest.approx(0.55) == linear[middle]
    assert cosine[middle - 9] > linear[middle - 9] and cosine[middle + 9] < linear[middle + 9]


def test_wsd_is_constant_until_the_last_steps() -> None:
    found = rates("wsd", decaySteps=10)
    assert set(found[4:31]) == {1.0}
    assert found[35] == pytest.approx(0.55)
    assert set(rates("wsd")[4:37]) == {1.0}  # a tenth of the steps
    assert rates("wsd")[37] < 1


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert rates(warmup=0)[0] == 1.0
