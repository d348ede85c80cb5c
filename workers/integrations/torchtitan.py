"""Checkpoint managers of torchtitan that report to Holdfast, or keep the trainer's state in the
memory of the nodes.

torchtitan's Trainer calls its checkpoint manager before the loop and after each step, and gives it
itself as a part of the state. So the manager is all that has to be replaced: torchtitan's own
checkpoints are written as before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.facts import WorkerPhase
from holdfast.workers import session
from holdfast.workers.session import reporting

DATA_ROOM_BYTES = 2**20
"""Room for the state of a rank's data loader, which has the tokens that it has read ahead: 1 MiB
are a document of about 100,000."""


class ReportedCheckpoints(CheckpointManager):  # type: ignore[misc]
    """Reports each step, and evaluations and saves as phases. On the notice of a planned stop it
    saves a checkpoint, and training ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, states: dict[str, Any], **parts: Any) -> None:
        self._trainer = states["train_state"]
        self._loss: float | None = None
        super().__init__(config, states=states, **parts)

    def load(self, step: int = -1) -> bool:
        """Called before the loop, when the trainer is complete."""
        self._observe()
        loaded = super().load(step)
        reporting.begin(self._trainer.step - 1)
        return bool(loaded)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Called after each step. torchtitan counts steps from 1."""
        reporting.report(curr_step - 1, **self._numbers)
        notice = reporting.preemption() if self.enable and not self.load_only else None
        leaves = notice is not None and curr_step - 1 == notice.after_step
        if leaves:
            self.interval = 1
        saved = self._save_in_phase(curr_step, last_step)
        if leaves:
            self.maybe_wait_for_saving()
            raise SystemExit(0)
        return saved

    def _save_in_phase(self, curr_step: int, last_step: bool) -> bool:
        if not (self.enable and self._should_save(curr_step, last_step)):
            return False
        with self._phase("save"):
            return bool(super().save(curr_step, last_step))

    def _phase(self, name: WorkerPhase) -> AbstractContextManager[None]:
        return reporting.phase(name)

    @property
    def _numbers(self) -> dict[str, Any]:
        """Numbers in the report of a step. The loss is the last one that the trainer has logged."""
        trainer, tokens = self._trainer, self._tokens
        flops = max(0, trainer.metrics_processor.num_flops_per_token) * tokens
        total = trainer.config.training.steps
        return {"loss": self._loss, "tokens": tokens, "flops": float(flops), "total_steps": total}

    @cached_property
    def _tokens(self) -> int:
        """Tokens of a global batch."""
        training, dims = self._trainer.config.training, self._trainer.parallel_dims
        batch = training.global_batch_size
        if batch < 0:
            batch = training.local_batch_size * dims.dp_replicate * dims.dp_shard
        return int(batch * training.seq_len)

    def _observe(self) -> None:
        metrics, validator = (
            self._trainer.metrics_processor,
            self._trainer.__dict__.get("validator"),
        )
        log = metrics.log

        @wraps(log)
        def log_and_note(step: int, global_avg_loss: float, *args: Any, **more: Any) -> None:
            self._loss = float(global_avg_loss)
            log(step, global_avg_loss, *args, **more)

        metrics.log = log_and_note
        if validator is not None:
            validator.validate = self._in_phase(validator.validate)

    def _in_phase(self, validate: Callable[..., None]) -> Callable[..., None]:
        @wraps(validate)
        def validate_in_phase(*args: Any, **more: Any) -> None:
            with self._phase("evaluate"):
                validate(*args, **more)

        return validate_in_phase


class InMemoryCheckpoints(ReportedCheckpoints):
    """Keeps the trainer's state in the nodes' memory: after a failure it resumes with the next
    step. What the nodes' memory or storage has comes before torchtitan's own checkpoints, which a
    first launch reads."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        data_room_bytes: int = DATA_ROOM_BYTES
        """Largest state of a rank's data loader."""

    def __init__(self, config: Any, **parts: Any) -> None:
        self._data_room_bytes = config.data_room_bytes
        self._session: session.Session | None = None
        self._finished = False
        super().__init__(config, **parts)

    def load(self, step: int = -1) -> bool:
        """Raises UserError for a second call, and for pipelines, whose ranks hold parts of the
        model that the session does not know."""
        trainer = self._trainer
        if self._session is not None or trainer.parallel_dims.pp_enabled:
            got = "pipeline_parallel_degree > 1" if self._session is None else "a second training"
            raise UserError(
                f"holdfast.torchtitan.in_memory: got {got}; expected one training without a "
                "pipeline; use holdfast.torchtitan.report and torchtitan's own checkpoints"
            )
        self._observe()
        self._session = s = session.init()
        loaded = s.restoring or bool(CheckpointManager.load(self, step))
        (model,) = trainer.model_parts
        kept = {"train_state": trainer, "lr_scheduler": trainer.lr_schedulers}
        loader = session.PerRank(trainer.dataloader, room_bytes=self._data_room_bytes)
        s.restore(
            model, trainer.optimizers, kept, per_rank={"dataloader": loader}, start=trainer.step
        )
        return loaded

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = self._save_in_phase(curr_step, last_step)
        assert self._session is not None
        self._session.step(curr_step - 1, **self._numbers)
        return saved

    def _phase(self, name: WorkerPhase) -> AbstractContextManager[None]:
        assert self._session is not None
        return self._session.phase(name)

    def _observe(self) -> None:
        """Nothing calls the manager when the loop ends; `close` follows an error too."""
        super()._observe()
        trainer = self._trainer
        continues, train_step = trainer.should_continue_training, trainer.train_step

        @wraps(continues)
        def continues_or_finishes() -> bool:
            going = bool(continues())
            if not going:
                self._finish()
            return going

        @wraps(train_step)
        def step_or_finish(*args: Any, **more: Any) -> None:
            try:
                train_step(*args, **more)
            except DataloaderExhaustedError:
                self._finish()
                raise

        trainer.should_continue_training, trainer.train_step = continues_or_finishes, step_or_finish

    def _finish(self) -> None:
        if not self._finished and self._session is not None:
            self._finished = True
            self._session.finish()
