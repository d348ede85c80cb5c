"""Lightning's state in memory has what callbacks made of the validation after its step."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.e2e]


def test_a_restored_trainer_has_validated_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from holdfast.integrations import InMemoryLightning
    from holdfast.workers.session.core import Session

    class Counts(Callback):  # type: ignore[misc]
        num = 0

        def on_validation_end(self, *_: Any) -> None:
            self.num += 1

        def state_dict(self) -> dict[str, int]:
            return {"num": self.num}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.num = state["num"]

    def trained() -> list[tuple[int, int]]:
        """(Step, validations) of each report."""
        counts, own, reports = Counts(), InMemoryLightning(), []

        def report(_: Session, step: int, **__: Any) -> None:
            reports.append((step, counts.num))
            states[step] = own._kept.state_dict()

        monkeypatch.setattr(Session, "step", report)
        Trainer(
            accelerator="cpu", max_epochs=2, val_check_interval=2, num_sanity_val_steps=0,
            logger=False, enable_checkpointing=False, callbacks=[own, counts],
            limit_train_batches=5, enable_progress_bar=False,
        ).fit(BoringModel())  # fmt: skip
        return reports

    def restore(s: Session, *parts: Any, **__: Any) -> None:
        parts[-1].load_state_dict(before[s.next_step - 1])

    states: dict[int, Any] = {}
    whole = trained()
    assert whole == [(s, s // 5 * 2 + (s % 5 + 1) // 2) for s in range(10)]
    monkeypatch.setattr(Session, "restoring", True)
    monkeypatch.setattr(Session, "restore", restore)
    before = dict(states)
    for step in before:
        monkeypatch.setattr(Session, "next_step", step + 1)
        assert trained() == whole[step + 1 :]
