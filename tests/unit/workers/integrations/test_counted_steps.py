"""The steps of transformers' Trainer, as the hook in its CallbackHandler counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.workers.integrations import patches, resumed_transformers
from holdfast.workers.worker_protocol import FromWorker, Reported


class Handler:
    """Has the methods of transformers' CallbackHandler, from 4.0 on."""

    def __init__(self, sent: list[FromWorker]) -> None:
        self.sent = sent

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> str:
        return "begun"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> int:
        return len(self.sent)


def test_each_step_is_reported_before_callbacks_run_and_where_training_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[FromWorker] = []
    monkeypatch.setattr(patches, "send", sent.append)
    kind = type("Handler", (Handler,), {})
    resumed_transformers.count_steps(kind)
    resumed_transformers.count_steps(kind)
    handler = kind(sent)
    state = SimpleNamespace(global_step=70, max_steps=400, log_history=[])
    assert handler.on_train_begin(None, state, None) == "begun"
    for step, logged in ((71, {"loss": 0.5}), (72, {"eval_loss": 1.0}), (73, {"loss": "high"})):
        state.global_step = step
        state.log_history.append(logged)
        assert handler.on_step_end(None, state, None) == len(sent) == step - 69, "once"
    begins, *steps = [message for message in sent if isinstance(message, Reported)]
    assert (begins.step, begins.began_after, begins.source) == (-1, 69, "counted")
    assert [(one.step, one.total_steps, one.loss) for one in steps] == [
        (70, 400, 0.5), (71, 400, 0.5), (72, 400, 0.5)
    ]  # fmt: skip
    assert steps[0].step_s == 0.0 and steps[1].step_s > 0
