"""Progress of a DeepSpeed engine: each step that updates the parameters, its loss, evaluations and
saves.

What is extended are methods of the engine: a pipeline trains and evaluates by train_batch and
eval_batch, any other engine by forward, backward and step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError
from holdfast.workers.session import reporting

_reports: list[_Reporting] = []
"""Reports of the engines of this process. The steps of the first one count."""


def report_deepspeed(
    engine: Any,
    *,
    total_steps: int = 0,
    tokens: int = 0,
    save: Callable[[int], object] | None = None,
) -> Any:
    """Has `engine`, of deepspeed.initialize, report its steps, evaluations and saves. Returns the
    engine.

        report_deepspeed(engine, save=lambda step: engine.save_checkpoint(folder))

    `total_steps`: how many the script will train; `tokens`: of a global batch. `save` is called on
    all ranks on the notice of a planned stop, with the number of the finished step, which counts
    from 0, and then the process exits; without it the stop comes as SIGTERM. The loss is the mean
    of what this rank gave `backward`, or what `train_batch` returned. While the engine saves or
    evaluates (in eval mode or without gradients), and after step total_steps, a rank may make no
    progress for 600 s; each batch of an evaluation is progress.

    Of several engines in a process the steps of the first one count. Those of the others, such as a
    critic, only show that the process works, and their evaluations and saves are as above. Outside
    Holdfast nothing changes. Raises UserError for another object.
    """
    missing = [name for name in ("global_steps", "save_checkpoint") if not hasattr(engine, name)]
    if missing:
        raise UserError(
            f"holdfast.integrations.report_deepspeed: got {type(engine).__name__}, which has no "
            f"{missing[0]}; expected an engine; give the first result of deepspeed.initialize"
        )
    if not any(engine is report.engine for report in _reports):
        _reports.append(_Reporting(engine, total_steps, tokens, save))
        _reports[-1].extend()
    return engine


class _Reporting:
    """Reports the steps of one engine."""

    def __init__(
        self, engine: Any, total_steps: int, tokens: int, save: Callable[[int], object] | None
    ) -> None:
        self.engine, self._total, self._tokens, self._save = engine, total_steps, tokens, save
        self._counts, self._began, self._ended = not _reports, False, False
        self._losses: list[Tensor] = []
        """Losses of the micro-batches since the last step."""

    def extend(self) -> None:
        engine = self.engine
        if hasattr(type(engine), "train_batch"):  # the engine has the attributes of the model too
            engine.train_batch = self._stepping(engine.train_batch)
            engine.eval_batch = self._evaluating(engine.eval_batch)
        else:
            engine.step = self._stepping(engine.step)
            engine.backward = self._noting_loss(engine.backward)
            engine.register_forward_pre_hook(self._before_forward)
        engine.save_checkpoint = self._saving(engine.save_checkpoint)

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def step_and_report(*args: Any, **more: Any) -> Any:
            before = self.engine.global_steps
            self._trains()
            result = step(*args, **more)
            if self.engine.global_steps > before:  # or it accumulates
                self._stepped(result if isinstance(result, Tensor) else None)
            else:
                self._trains()
            return result

        return step_and_report

    def _trains(self) -> None:
        if self._counts and not self._began:
            self._began = True
            reporting.begin(self.engine.global_steps - 1)
        reporting.progress("finish" if _reports[0]._ended else "train")

    def _stepped(self, loss: Tensor | None) -> None:
        losses, self._losses = self._losses, []
        if not self._counts:
            self._trains()
            return
        if losses:
            loss = torch.stack(losses).mean()
        step, total = self.engine.global_steps - 1, self._total
        reporting.report(step, loss=loss, tokens=self._tokens, total_steps=total)
        if self._save is not None:
            notice = reporting.preemption()
            if notice is not None and step == notice.after_step:
                self._save(step)
                raise SystemExit(0)
        if step + 1 == total:
            self._ended = True
            self._trains()

    def _noting_loss(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def backward_of_loss(loss: Any, *args: Any, **more: Any) -> Any:
            if self._counts and isinstance(loss, Tensor) and loss.numel() == 1:
                self._losses.append(loss.detach().float().reshape(()))
            return backward(loss, *args, **more)

        return backward_of_loss

    def _before_forward(self, _module: Any, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self.engine.module.training:
            self._trains()
        else:
            reporting.progress("evaluate")

    def _evaluating(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(evaluate)
        def evaluate_in_phase(*args: Any, **more: Any) -> Any:
            reporting.progress("evaluate")
            return evaluate(*args, **more)

        return evaluate_in_phase

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(save)
        def save_in_phase(*args: Any, **more: Any) -> Any:
            with reporting.phase("save"):
                return save(*args, **more)

        return save_in_phase
