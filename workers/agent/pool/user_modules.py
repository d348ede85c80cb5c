"""The modules of `spec.preload`: imported once per node, in the forkserver, so that the workers of
a recovery have them.

A process that has threads or has opened CUDA must not fork. If an import does that, the forkserver
starts again without it, and each standby imports the modules itself.
"""

from __future__ import annotations

import gc
import importlib
import sys

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem, UserError

from ..process import process_env
from . import preload


def import_before_fork(job: TrainingJob) -> str:
    """Import them; the reason why this process must not fork any more, "" if it may. One that
    cannot be imported is left to the worker, which reports it."""
    if not job.spec.preload:
        return ""
    process_env.adopt(job.spec.env)  # libraries read it when they are imported
    for name in job.spec.preload:
        import_quietly(name)
        if problem := _cannot_fork():
            return f"the import of {name} {problem}"
    gc.collect()
    gc.freeze()
    return ""


def import_after_fork(job: TrainingJob) -> None:
    """In a standby, while it waits for a rank."""
    for name in job.spec.preload:
        import_quietly(name)


def import_quietly(name: str) -> None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        print(f"spec.preload: {name}: {type(error).__name__}: {error}", file=sys.stderr)


def expect_imported(job: TrainingJob) -> None:
    """In a worker, before its entrypoint. Raises UserError for a module that cannot be imported."""
    for position, name in enumerate(job.spec.preload):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            got = f"{name} ({type(error).__name__}: {error})"
            expected = "a module that can be imported on every node"
            fix = "install it there, or remove it from the list"
            problem = Problem(f"spec.preload.{position}", got, expected, fix)
            raise UserError(str(problem)) from None


def _cannot_fork() -> str:
    if (threads := preload.num_threads()) > 1:
        return f"started {threads - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "opened CUDA"
    return ""
