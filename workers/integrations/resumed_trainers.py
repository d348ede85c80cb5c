"""A trainer that is started again goes on from the newest complete checkpoint that it wrote itself,
where its script does not say from which one: `Trainer.train()` of transformers and
`Trainer.fit(model)` of Lightning begin at step 0.

Its own: in the folder that this trainer writes to, and written since the job was submitted. Ranks
agree on it. What a script gives, `False` included, is left alone, and so is a second training into
the same folder, which begins where the first one does. The first launch of a job changes nothing,
but Lightning's checkpoints have their place in the data from it on (lightning_data.py).

The trainer of transformers counts its steps here too, so that it is known which are trained twice.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from holdfast.orchestrator.protocol.environment import RESUME_FROM, RESUME_SINCE
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.file_audit import STARTS_OVER
from holdfast.workers.agent.storage import script_checkpoints

from . import lightning_data

MAX_NAMES = 8
"""Newest checkpoints that ranks compare."""
_begun: set[Path] = set()
"""Folders into which this process has trained."""


def adapt(module: ModuleType) -> None:
    """`module`: that of transformers' Trainer, or that of Lightning's connector for checkpoints,
    which writes its place in the data from the first launch on."""
    package = module.__name__.partition(".")[0]
    try:
        if package != "transformers":
            lightning_data.keep_place(module._CheckpointConnector)
        if RESUME_SINCE not in os.environ:
            return
        since_ns = int(os.environ[RESUME_SINCE])
        if package == "transformers":
            _adapt(module.Trainer, "train", "resume_from_checkpoint", _in_output_dir, since_ns)
        else:
            _adapt(
                module._CheckpointConnector,
                "resume_start",
                "checkpoint_path",
                _in_dirpath,
                since_ns,
                _behind_trained_batches,
            )
    except (AttributeError, ValueError) as error:
        version = getattr(sys.modules.get(package), "__version__", "of an unknown version")
        text = f"{package} {version} is not known to Holdfast ({error}): its trainer goes on only "
        _say(f"{text}if the script says from where{_although()}")


def _adapt(
    owner: Any,
    name: str,
    parameter: str,
    choose: Callable[..., str | None],
    since_ns: int,
    then: Callable[[Any], None] = lambda trainer: None,
) -> None:
    """Has this method get what is chosen where the script gives none, and calls `then` with its
    object afterwards."""
    inner = getattr(owner, name)
    if getattr(inner, "goes_on", False):
        return
    found = list(inspect.signature(inner).parameters.values())
    if len(found) < 2 or found[1].name != parameter or found[1].default is not None:
        raise ValueError(f"{name} has no {parameter}=None")

    @wraps(inner)
    def begin(*args: Any, **more: Any) -> Any:
        given = inspect.signature(inner).bind(*args, **more)
        chosen = None
        if given.arguments.get(parameter) is False:
            sys.audit(STARTS_OVER)
        if given.arguments.get(parameter) is None:
            chosen = given.arguments[parameter] = choose(given.arguments, since_ns)
        result = inner(*given.args, **given.kwargs)
        if chosen is not None:
            then(args[0])
        return result

    begin.goes_on = True  # type: ignore[attr-defined]
    setattr(owner, name, begin)


# -- transformers -----------------------------------------------------------------------------
def _in_output_dir(given: dict[str, Any], since_ns: int) -> str | None:
    arguments = given["self"].args
    if given.get("trial") is not None:  # of a search for hyperparameters
        return None
    folder = Path(arguments.output_dir)
    names = [one for one in _names(folder, since_ns) if _is_of_transformers(folder / one, since_ns)]
    names.sort(key=lambda name: int(name.rpartition("-")[2]), reverse=True)
    newest = Path(os.environ.get(RESUME_FROM, ""))
    if newest.name in names and newest.parent == folder.resolve():
        names = names[names.index(newest.name) :]  # with a newer one a start has failed
    agreed, names = _agreed(names[:MAX_NAMES])
    why = _second(folder)
    if not why and getattr(arguments, "save_only_model", False):
        why = "its checkpoints have the model only (save_only_model)"
    return _chosen("Trainer.train()", folder, agreed, names, why)


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


# -- steps of transformers --------------------------------------------------------------------
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
        _send(worker_protocol.Reported(
            step=-1, began_after=state.global_step - 1, source="counted"
        ))  # fmt: skip
        return begin(self, args, state, *rest, **more)

    @wraps(end)
    def on_step_end(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> Any:
        nonlocal last_s, loss
        now_s = time.perf_counter()
        logged = state.log_history[-1].get("loss") if state.log_history else None
        loss = float(logged) if isinstance(logged, (int, float)) else loss
        _send(worker_protocol.Reported(
            step=state.global_step - 1, total_steps=max(0, state.max_steps), source="counted",
            step_s=now_s - last_s if last_s else 0.0, loss=loss,
        ))  # fmt: skip
        last_s = now_s
        return end(self, args, state, *rest, **more)

    on_step_end.counts_steps = True  # type: ignore[attr-defined]
    handler_class.on_train_begin, handler_class.on_step_end = on_train_begin, on_step_end


# -- Lightning --------------------------------------------------------------------------------
def _in_dirpath(given: dict[str, Any], since_ns: int) -> str | None:
    """Of the folder of its first ModelCheckpoint that has checkpoints; without a given one it is a
    new folder (`version_N`) in each start, in which there is none."""
    trainer = given["self"].trainer
    if str(getattr(trainer.state.fn, "value", trainer.state.fn)) != "fit":
        return None
    writers = [one for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)]
    folders = dict.fromkeys(Path(one.dirpath) for one in writers if not one.save_weights_only)
    for folder in folders:
        written = _names(folder, since_ns)
        names = sorted(written, key=written.__getitem__, reverse=True)
        names = [name for name in names if name.endswith(".ckpt")][:MAX_NAMES]
        agreed, names = _agreed([one for one in names if not _is_torn(folder / one)])
        if names:
            return _chosen("Trainer.fit()", folder, agreed, names, _second(folder))
    for folder in folders:
        _second(folder)
    return _chosen("Trainer.fit()", next(iter(folders), None), "", [], "")


def _behind_trained_batches(connector: Any) -> None:
    place = connector._loaded_checkpoint.get(lightning_data.PLACE, {})
    lightning_data.go_on_behind(connector.trainer, place, _say)


def _is_torn(path: Path) -> bool:
    try:
        return path.is_file() and bool(script_checkpoints.torn(path))
    except OSError:
        return True


# -- both -------------------------------------------------------------------------------------
def _names(folder: Path, since_ns: int) -> dict[str, int]:
    """What this job has written into it, with the times."""
    try:
        found = {one.name: one.stat().st_mtime_ns for one in folder.iterdir()}
    except OSError:
        return {}
    return {name: written_ns for name, written_ns in found.items() if written_ns >= since_ns}


def _second(folder: Path) -> str:
    """Empty for the first training of this process into a folder."""
    known = folder.resolve() in _begun
    _begun.add(folder.resolve())
    return f"it is the second training of this process into {folder}" if known else ""


def _agreed(names: list[str]) -> tuple[str, list[str]]:
    """The first of the names that all ranks have, empty if there is none; all names of rank 0."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return next(iter(names), ""), names
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    first = everywhere[0]
    return next((one for one in first if all(one in they for they in everywhere)), ""), first


def _chosen(call: str, folder: Path | None, agreed: str, names: list[str], why: str) -> str | None:
    """The path of what was agreed on, unless there is a reason not to take it. The log of rank 0
    and the events have one line about it."""
    if agreed and not why:
        path = str(folder / agreed) if folder is not None else agreed
        _say(f"{call} goes on from {path}, its newest complete checkpoint since the job began")
        return path
    if names and not agreed:
        why = f"not every rank finds {names[0]} in {folder}, which the nodes have to share"
    if names or _although():
        why = why or f"this job has written none into {folder or 'a folder of its own'}"
        _say(f"{call} begins without a checkpoint{_although()}: {why}")
    return None


def _although() -> str:
    newest = os.environ.get(RESUME_FROM, "")
    return f", although checkpoint {newest} is complete" if newest else ""


def _say(text: str) -> None:
    """Of rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
    _send(worker_protocol.Noted(text=text))


def _send(message: worker_protocol.FromWorker) -> None:
    """Tell the agent; outside Holdfast nothing happens."""
    attached = vars(worker_transport).get("attached")
    # Another Python is not attached for it: its pulse would end, see agent/pool/other_pulse.py.
    inherited = os.environ.get(worker_transport.INHERITED, "")
    if attached is None and not inherited:
        return
    fd = attached.link.fileno() if attached is not None else int(inherited.split()[0])
    try:
        with socket.socket(fileno=os.dup(fd)) as link:
            worker_transport.send(link, message)
    except OSError:
        return  # the agent has ended, so this process ends too
