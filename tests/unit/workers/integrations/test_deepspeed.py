"""What an engine of DeepSpeed reports."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.integrations import report_deepspeed
from holdfast.workers.session import reporting


class Engine:
    """As DeepSpeed's: a step of an accumulated micro-batch updates nothing."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate, self.micro_steps, self.global_steps = accumulate, 0, 0

    def step(self, lr_kwargs: Any = None) -> None:
        self.micro_steps += 1
        self.global_steps += self.micro_steps % self.accumulate == 0

    def save_checkpoint(self, folder: str, tag: str | None = None) -> bool:
        return folder == "out" and tag == "t"


def test_steps_that_update_are_reported_and_saves_return_what_they_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(reporting, "report", steps.append)
    engine = Engine(accumulate=2)
    assert report_deepspeed(engine) is engine
    for _ in range(5):
        engine.step()
    assert steps == [0, 1]
    assert engine.save_checkpoint("out", tag="t")
