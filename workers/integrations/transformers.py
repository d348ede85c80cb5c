"""Progress of transformers' Trainer, and of what is built on it: each step, evaluations and saves.

Steps are counted without it too (resumed_transformers.py). With this callback Holdfast also knows
when the trainer evaluates or saves, and has it save before a planned stop.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from holdfast.workers.session import reporting


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[TransformersCallback()])`. Every rank reports.

    The loss is the last one that the trainer has logged (`logging_steps`). While the trainer
    evaluates or saves, and after its last step, a rank may make no progress for 600 s; each batch
    of an evaluation or a prediction is progress. On the notice of a planned stop the trainer saves
    a checkpoint, without an evaluation before it, and the process exits.
    """

    def __init__(self) -> None:
        self._loss: float | None = None
        self._leaves = self._trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reporting.begin(state.global_step - 1)
        self._trains = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if isinstance((logs or {}).get("loss"), (int, float)):
            self._loss = float(logs["loss"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reporting.enter("train")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reporting.report(
            state.global_step - 1, loss=self._loss, total_steps=max(0, state.max_steps)
        )
        notice = reporting.preemption()
        if notice is not None and state.global_step > notice.after_step:
            # The trainer would evaluate first, for longer than the stop waits, and with
            # save_strategy "best" save only what is better.
            self._leaves = control.should_save = True
            control.should_evaluate = False
        self._next(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._next(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reporting.progress("evaluate")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called for each data set: the next batch, or the next step, says what follows."""
        if self._trains and (control.should_save or args.save_strategy == "best"):
            reporting.enter("save")  # with "best": the trainer decides after this call

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._leaves:
            raise SystemExit(0)
        reporting.enter("finish" if control.should_training_stop else "train")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trains = False
        reporting.enter("finish")

    def _next(self, control: Any) -> None:
        """The trainer has decided what it does before the next step; it does not tell when that
        begins."""
        if control.should_evaluate:
            reporting.enter("evaluate")
        elif control.should_save:
            reporting.enter("save")
        elif control.should_training_stop:
            reporting.enter("finish")
