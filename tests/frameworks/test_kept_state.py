"""State in a kept process of transformers' trainer that no checkpoint has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from holdfast import session
from holdfast.orchestrator.protocol.facts import Restore
from holdfast.workers.session.attempts import AttemptHalted

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from torch.optim.swa_utils import AveragedModel
from transformers import Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations import in_memory
from holdfast.workers.integrations import transformers_memory

pytestmark = [pytest.mark.e2e]
NEEDS = ("transformers", "accelerate")


class Meter:
    total = 0


class Parts(TrainerCallback):
    """Callback with all that one may have."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.model, self.lock = trainer, trainer.model, threading.Lock()
        self.average = AveragedModel(trainer.model)
        self.shadow = {"weight": torch.zeros(9)}
        self.meters = {"loss": Meter()}
        self.numbers, self.generator = numpy.zeros(9999), torch.Generator()


def trainer_with_parts(folder: Path) -> Any:
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    trainer = Trainer(torch.nn.Linear(2, 2), arguments, data_collator=Meter())
    for _ in range(2):
        trainer.add_callback(Parts(trainer))
    return trainer


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "Parts.average": lambda _, parts: parts.average.update_parameters(parts.model),
    "Parts.shadow": lambda _, parts: parts.shadow["weight"].data.add_(1e-9),
    "Parts.meters": lambda _, parts: setattr(parts.meters["loss"], "total", 1),
    "Parts.numbers": lambda _, parts: parts.numbers.__setitem__(5000, 1),
    "Parts.generator": lambda _, parts: torch.rand(1, generator=parts.generator),
    "Trainer.data_collator": lambda trainer, _: setattr(trainer.data_collator, "total", 1),
    "TrainingArguments.max_grad_norm": lambda trainer, _: setattr(trainer.args, "max_grad_norm", 9),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.items(), ids=CHANGES)
def test_a_change_of_what_no_checkpoint_has_is_seen(
    name: str, change: Callable[[Any, Any], object], tmp_path: Path
) -> None:
    trainer = trainer_with_parts(tmp_path)
    before = transformers_memory._state_of_parts(trainer)
    with torch.no_grad():
        trainer.model.weight.add_(1)
    trainer.state.global_step += 1
    assert transformers_memory._state_of_parts(trainer) == before
    for parts in trainer.callback_handler.callbacks[-2:]:
        change(trainer, parts)
        now = transformers_memory._state_of_parts(trainer)
        assert {part[1] for part in before if before[part] != now[part]} == {name}
        before = now if name.startswith("Parts") else before


class Epochs(TrainerCallback):
    """Callback that is interrupted in its second epoch, once."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.interrupted = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6 and not self.interrupted:
            self.interrupted = True
            raise AttemptHalted


def test_a_loop_that_begins_again_in_an_earlier_epoch_begins_this_epoch_and_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [{"x": torch.zeros(2), "labels": torch.zeros(2)} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", num_train_epochs=2,
        per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
    )  # fmt: skip

    class Model(torch.nn.Linear):
        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (super().forward(x) - labels).square().mean()}

    trainer: Any = in_memory(
        Trainer(Model(2, 2), arguments, train_dataset=data, callbacks=[epochs := Epochs()])
    )
    clocks: list[float] = []
    monkeypatch.setattr(trainer, "log", lambda logs, start=0.0: clocks.append(start))

    def loops(s: Any, _: Any) -> Any:
        yield 0
        if epochs.interrupted and s.generation == 1:
            s.generation, s._restore, s._last_step = (
                2,
                Restore(step=1, generation=1, num_shards=1),
                1,
            )
            trainer.state.global_step, trainer.state.epoch = 2, 0.5
            clocks.clear()
            began.append(time.time())
            yield 2

    began: list[float] = []
    monkeypatch.setattr(session.Session, "loops", loops)
    monkeypatch.setattr(session.Session, "attempt", lambda _: contextlib.suppress(AttemptHalted))
    monkeypatch.setattr(session.Session, "_begin_attempt", lambda *_: None)
    trainer.train()
    assert trainer.state.global_step == 8 and epochs.epochs == [0, 1, 0, 1]
    assert len(clocks) == 7 and min(clocks[:-1]) >= began[0]  # the last one has no clock
