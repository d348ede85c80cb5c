"""Modules that a script will import: of `spec.preload`, and those that its workers imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol import training_packages

from ..process import process_env
from . import preload

MAX_NAMES_BYTES = 100_000
"""Limit of the names in one message: about 3,000 modules."""


def import_after_fork(job: TrainingJob, modules: Sequence[str]) -> None:
    """Import what the template has not, in a standby while it waits for a rank."""
    if modules:
        process_env.adopt(job.spec.env)  # libraries read it when they are imported
    for name in modules:
        import_if_possible(name)


def import_if_possible(name: str) -> None:
    """The worker reports what is missing of `spec.preload`, the script what else it needs."""
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(name)


def installed_since(before: frozenset[str]) -> tuple[str, ...]:
    """The installed modules among those imported since, in their order. Not those of the standard
    library, which are quick, nor the user's own, which may be edited before the next start."""
    places = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
    names, size = [], 0
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if name in before or not (origin or "").startswith(places):
            continue
        size += len(name)
        if size > MAX_NAMES_BYTES:
            break
        names.append(name)
    return tuple(names)


def expect_imported(job: TrainingJob) -> None:
    """Check the imports of a worker before its entrypoint. Raises UserError for a torch that is too
    old or missing, and for a module that cannot be imported."""
    if lacking := training_packages.problem(*job.spec.entrypoint.packages):
        raise UserError(lacking)
    for position, name in enumerate(job.spec.preload):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            got = f"{name} ({type(error).__name__}: {error})"
            expected = "a module that can be imported on every node"
            fix = "install it there, or remove it from the list"
            raise UserError.of(f"spec.preload.{position}", got, expected, fix) from None


def cannot_fork() -> str:
    """Reason why this process must not fork, "" if it may."""
    if (threads := preload.num_threads()) > 1:
        return f"started {threads - 1} threads"
    # CUDA's driver opens it, also to count devices; NVML does not.
    opened = (link.resolve().name for link in Path("/proc/self/fd").iterdir())
    return "opened CUDA" if "nvidia-uvm" in opened else ""
