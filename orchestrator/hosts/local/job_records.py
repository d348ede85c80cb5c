"""Reading and deleting the records of local jobs, without their controllers.

The last view of a job comes from its journal: its newest snapshot and the records after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, UserError
from holdfast.orchestrator.journal.chunk_journal import contents, read
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.parts import part
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory, NameTaken
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.view import JobView

log = logging.getLogger("holdfast")


def measurements(directory: JobDirectory) -> Sequence[Any]:
    """The user's measurements of `holdfast spec plan --calibrate`."""
    read = part("measurements")
    return read(directory.home, log.warning) if read else ()


def read_view(directory: JobDirectory) -> JobView:
    """The view of a job as of the last event in its journal.

    Raises Damaged, and other HoldfastErrors when the job's files cannot be read now or by this
    version.
    """
    job = directory.job()
    projection = _project(job, directory)
    projection.use_measurements(measurements(directory))
    path = directory.checkpoint_path(job)
    view = projection.view(projection.now_ns, live=False, checkpoint_path=path)
    view.job_id = view.job_id or directory.job_id
    view.controller_alive = directory.controller_alive()
    return view


def _project(job: TrainingJob, directory: JobDirectory) -> JobProjection:
    with closing(FileStore(directory.journal)) as store:
        snapshot, records = contents(read(store))
    return replay(job, records, snapshot)


def expire(home: Home, now_ns: int) -> list[str]:
    """Delete jobs that finished longer than their ttlSecondsAfterFinished ago, and the files of
    interrupted deletions. Returns the names of the deleted jobs."""
    home.sweep()
    deleted = []
    for directory in home.list():
        try:
            ttl_s = directory.job().spec.ttl_s_after_finished
            finished_ns = read_view(directory).finished_ns if ttl_s is not None else None
            if ttl_s is None or finished_ns is None or now_ns < finished_ns + ttl_s * SECOND_NS:
                continue
            directory.remove()
        except HoldfastError:
            continue  # damaged, or a controller is still running: leave it
        deleted.append(directory.name)
    return deleted


def create_job(home: Home, job: TrainingJob, place: str | Path, job_id: str = "") -> JobDirectory:
    """Create a job's directory; `place`: the spec's. Raises UserError that describes the existing
    job when the name is taken."""
    try:
        return home.create(job, place, job_id)
    except NameTaken as taken:
        raise UserError(str(_name_taken(home, taken.directory))) from None


def _name_taken(home: Home, directory: JobDirectory) -> Problem:
    name, error = directory.name, None
    try:
        state: str = read_view(directory).state
    except HoldfastError as raised:
        error, state = raised, f"unreadable ({raised})"
    if directory.controller_alive():
        fix = f"watch it with `holdfast status {name}`"
    elif isinstance(error, Damaged):
        fix = f"restore it from a copy, remove it with `holdfast delete {name}`"
    elif error is not None:
        fix = f"make it readable, remove {directory.path} once none of its processes runs"
    elif state in TERMINAL:
        fix = (
            f"remove it with `holdfast delete {name}` (to continue from its checkpoints: "
            f"`holdfast delete {name} --keep-checkpoints DIRECTORY`)"
        )
    else:
        fix = f"its controller is gone: take it over with `holdfast attach {name}`"
    got = f"{name}, which exists in {home.path} ({state})"
    return Problem(
        "metadata.name", got, "an unused name", f"{fix}, or choose another metadata.name"
    )
