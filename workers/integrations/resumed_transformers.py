"""transformers' Trainer: `train()` goes on from the newest complete `checkpoint-N` in its folder
when it is started again, and its steps are counted, so that it is known which are trained twice."""

from __future__ import annotations

import os
import time
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.orchestrator.protocol.environment import RESUME_FROM, RESUME_SINCE
from holdfast.workers import worker_protocol
from holdfast.workers.agent.storage import script_checkpoints

from . import patches
from .patches import MAX_NAMES, agreed, chosen, second_training, written_since

TRIED = ("5.23.0", "5.24.0")
WITHOUT = "Trainer.train() begins where the script says, and its steps are not counted"


def patch(module: ModuleType) -> None:
    """`module`: that of CallbackHandler, or in a start after the first one that of Trainer."""
    if module.__name__ == "transformers.trainer_callback":
        count_steps(module.CallbackHandler)
    elif since := os.environ.get(RESUME_SINCE):
        patches.resume_own(
            module.Trainer, "train", "resume_from_checkpoint", _in_output_dir, int(since)
        )


def _in_output_dir(given: dict[str, Any], since_ns: int) -> str | None:
    arguments = given["self"].args
    if given.get("trial") is not None:  # of a search for hyperparameters
        return None
    folder = Path(arguments.output_dir)
    written = written_since(folder, since_ns)
    names = [name for name in written if _is_of_transformers(folder / name, since_ns)]
    names.sort(key=lambda name: int(name.rpartition("-")[2]), reverse=True)
    newest = Path(os.environ.get(RESUME_FROM, ""))
    if newest.name in names and newest.parent == folder.resolve():
        names = names[names.index(newest.name) :]  # with a newer one a start has failed
    name, names = agreed(names[:MAX_NAMES])
    why = second_training(folder)
    if not why and getattr(arguments, "save_only_model", False):
        why = "its checkpoints have the model only (save_only_model)"
    return chosen("Trainer.train()", folder, name, names, why)


def _is_of_transformers(path: Path, since_ns: int) -> bool:
    """The guard has set aside what is torn."""
    end = path.name.rpartition("-")[2]
    if not (path.name.startswith("checkpoint-") and end.isdigit()):
        return False
    try:
        written_ns = (path / "trainer_state.json").stat().st_mtime_ns
        return written_ns >= since_ns and not script_checkpoints.unfinished("transformers", path)
    except OSError:
        return False


def count_steps(handler_class: Any) -> None:
    """Has this class, CallbackHandler of transformers, report each step that is done, and after
    which one a training begins, on every rank."""
    begin, end = handler_class.on_train_begin, handler_class.on_step_end
    if getattr(end, "counts_steps", False):
        return
    last_s, loss = 0.0, None

    @wraps(begin)
    def on_train_begin(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> Any:
        nonlocal last_s
        last_s = 0.0
        patches.send(worker_protocol.Reported(
            step=-1, began_after=state.global_step - 1, source="counted"
        ))  # fmt: skip
        return begin(self, args, state, *rest, **more)

    @wraps(end)
    def on_step_end(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> Any:
        nonlocal last_s, loss
        now_s = time.perf_counter()
        logged = state.log_history[-1].get("loss") if state.log_history else None
        loss = float(logged) if isinstance(logged, (int, float)) else loss
        patches.send(worker_protocol.Reported(
            step=state.global_step - 1, total_steps=max(0, state.max_steps), source="counted",
            step_s=now_s - last_s if last_s else 0.0, loss=loss,
        ))  # fmt: skip
        last_s = now_s
        return end(self, args, state, *rest, **more)

    on_step_end.counts_steps = True  # type: ignore[attr-defined]
    handler_class.on_train_begin, handler_class.on_step_end = on_train_begin, on_step_end
