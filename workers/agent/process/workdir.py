"""Enters the working directory of a worker's entrypoint.

The base of a recipe's data stays the directory of the spec, whether or not this node has it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem
from holdfast.orchestrator.protocol import files
from holdfast.workers import worker_protocol


def enter(assign: worker_protocol.Assign, job: TrainingJob) -> Problem | None:
    """Enter the working directory. Returns the problem if this node lacks it or the script."""
    entry, written = job.spec.entrypoint, job.spec.working_directory
    try:
        directory = files.resolve(assign.spec_directory, written)
        os.chdir(directory)
        if entry.script is not None:
            files.resolve(directory, entry.script).stat()
        return None
    except OSError as error:
        why = f"{error.filename}: {error.strerror} on this node"
    if entry.recipe is not None and Path(written) == Path():
        _enter_logs(assign, why)
        return None
    if entry.script is None:
        got, expected = f"{written} ({why})", "a directory of every node"
        return Problem("spec.workingDirectory", got, expected)
    got, expected = f"{entry.script} ({why})", "a file of every node"
    fix = (
        "on Kubernetes it has to be in the image; on Ray, `holdfast submit` takes along what lies "
        "beside the spec file"
    )
    return Problem("spec.entrypoint.script", got, expected, fix)


def _enter_logs(assign: worker_protocol.Assign, why: str) -> None:
    """A recipe needs only the spec, which came with the job."""
    logs = Path(assign.log_file).parent
    os.chdir(logs)
    print(f"not in the spec's directory ({why}), but in {logs.resolve()}", file=sys.stderr)
