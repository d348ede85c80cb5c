"""Common part of the patches of other people's frameworks. Each framework has one file beside this
one, with the versions that it was tried with; framework_hooks.py names the modules to patch.

Patches are for what a resume needs only; the steps of transformers are counted from the first
start, so that a resume knows which ones it repeats. A trainer started again resumes from the newest
complete checkpoint that it wrote itself, where its script does not say from which one. Its own: in
the folder that this trainer writes to, and written since the job was submitted. Ranks agree on it.
What a script gives, `False` included, is left alone, and so is a second training into the same
folder, which begins where the first one does.

`checkpoint.guard: {never: {}}` in the spec turns all of them off, and the guard of checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import socket
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from holdfast.orchestrator.protocol.environment import RESUME_FROM
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.file_audit import STARTS_OVER

MAX_NAMES = 8
"""Newest checkpoints that ranks compare."""
_begun: set[Path] = set()
"""Folders into which this process has trained."""
_left_alone: set[str] = set()
"""Frameworks that were named as such."""


def forget() -> None:
    """The script begins again in this process."""
    _begun.clear()
    _left_alone.clear()


def apply(module: ModuleType, file: str) -> None:
    """Patch a framework's module by the file beside this one, which has TRIED (versions), WITHOUT
    (what happens without the patch) and patch(module). A version of another release line than
    those, and one that is not as expected, is left alone, and one line names it."""
    package = module.__name__.partition(".")[0]
    patches = importlib.import_module(f".{file}", __package__)
    version = _version(package)
    lines = {_release_line(tried) for tried in patches.TRIED}
    why = "" if _release_line(version) in lines else f"tried with {', '.join(patches.TRIED)}"
    if not why:
        try:
            patches.patch(module)
        except (AttributeError, ValueError) as error:
            why = f"it is not as expected: {error}"
    if why and package not in _left_alone:
        _left_alone.add(package)
        say(f"{package} {version} is not patched ({why}): {patches.WITHOUT}{although()}")


def _version(package: str) -> str:
    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        return str(version or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _release_line(version: str) -> tuple[str, ...]:
    """Versions of one minor release are taken for compatible: 5.23.1 -> 5.23."""
    return tuple(version.split(".")[:2])


def resume_own(
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
    parameters = list(inspect.signature(inner).parameters.values())
    if len(parameters) < 2 or parameters[1].name != parameter or parameters[1].default is not None:
        raise ValueError(f"{name} has no {parameter}=None")

    @wraps(inner)
    def begin(*args: Any, **more: Any) -> Any:
        call = inspect.signature(inner).bind(*args, **more)
        chosen = None
        if call.arguments.get(parameter) is False:
            sys.audit(STARTS_OVER)
        if call.arguments.get(parameter) is None:
            chosen = call.arguments[parameter] = choose(call.arguments, since_ns)
        result = inner(*call.args, **call.kwargs)
        if chosen is not None:
            then(args[0])
        return result

    begin.goes_on = True  # type: ignore[attr-defined]
    setattr(owner, name, begin)


def written_since(folder: Path, since_ns: int) -> dict[str, int]:
    """Names that this job has written into a folder -> times."""
    try:
        times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    except OSError:
        return {}
    return {name: written_ns for name, written_ns in times.items() if written_ns >= since_ns}


def second_training(folder: Path) -> str:
    """Empty for the first training of this process into a folder."""
    is_second = folder.resolve() in _begun
    _begun.add(folder.resolve())
    return f"it is the second training of this process into {folder}" if is_second else ""


def agreed(names: list[str]) -> tuple[str, list[str]]:
    """The first of the names that all ranks have, empty if there is none; all names of rank 0."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return next(iter(names), ""), names
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    first = everywhere[0]
    return next((name for name in first if all(name in they for they in everywhere)), ""), first


def chosen(call: str, folder: Path | None, agreed: str, names: list[str], why: str) -> str | None:
    """The path of what was agreed on, unless there is a reason not to take it. The log of rank 0
    and the events have one line about it."""
    if agreed and not why:
        path = str(folder / agreed) if folder is not None else agreed
        say(f"{call} continues from {path}, its newest complete checkpoint since the job began")
        return path
    if names and not agreed:
        why = f"not every rank finds {names[0]} in {folder}, which the nodes have to share"
    if names or although():
        why = why or f"this job has written none into {folder or 'a folder of its own'}"
        say(f"{call} begins without a checkpoint{although()}: {why}")
    return None


def although() -> str:
    newest = os.environ.get(RESUME_FROM, "")
    return f", although checkpoint {newest} is complete" if newest else ""


def say(text: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
    send(worker_protocol.Noted(text=text))


def send(message: worker_protocol.FromWorker) -> None:
    """Tell the agent; outside Holdfast nothing happens."""
    attached = vars(worker_transport).get("attached")
    # Another Python is not attached for it: its pulse would end, see agent/pool/other_pulse.py.
    inherited = os.environ.get(worker_transport.INHERITED, "")
    if attached is None and not inherited:
        return
    fd = attached.link.fileno() if attached is not None else int(inherited.split()[0])
    # OSError: the agent has ended, so this process ends too.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
        worker_transport.send(link, message)
