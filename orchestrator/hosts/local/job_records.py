"""A job's record as somebody reads it who is not its controller: its last view, and its name.

Owns: the fold of a journal on disk, and what is said when a name is taken. Must not: write.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, UserError
from holdfast.orchestrator.runtime.observe.goodput import NS
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.view import JobView

from .file_journal import JournalError, JournalReader, Record, Snapshot
from .job_directory import Home, JobDirectory, NameTaken
from .replay import replay


def read_view(directory: JobDirectory) -> JobView:
    """The view of a job whose controller is not asked: as of the last event in its journal.

    Raises Damaged, and other HoldfastErrors when the job's files cannot be read now or by this
    version.
    """
    job = directory.job()
    story = _story(job, directory)
    view = story.view(story.now_ns, live=False, checkpoint_path=directory.checkpoint_path(job))
    view.job_id = view.job_id or directory.job_id
    view.controller_alive = directory.controller_alive()
    return view


def _story(job: TrainingJob, directory: JobDirectory) -> JobProjection:
    """The fold of the newest snapshot and of what came after it."""
    try:
        directory.journal.stat()
    except FileNotFoundError:
        return JobProjection(job)
    except OSError as error:
        raise JournalError(f"{directory.journal}: cannot be read ({error.strerror})") from None
    reader = JournalReader(directory.journal)
    try:
        items = list(reader.read())
    finally:
        reader.close()
    # The last one only counts where this reader was overtaken by a compaction.
    starts = [index for index, item in enumerate(items) if isinstance(item, Snapshot)]
    first = starts[-1] if starts else 0
    records = [item for item in items[first:] if isinstance(item, Record)]
    start = items[first] if starts else None
    return replay(job, records, start.data if isinstance(start, Snapshot) else None)


def expire(home: Home, now_ns: int) -> list[str]:
    """Delete the records of jobs that finished longer than their ttlSecondsAfterFinished ago, and
    what interrupted deletions have left."""
    home.sweep()
    deleted = []
    for directory in home.list():
        try:
            ttl_s = directory.job().spec.ttl_s_after_finished
            finished_ns = read_view(directory).finished_ns if ttl_s is not None else None
            if ttl_s is None or finished_ns is None or now_ns < finished_ns + ttl_s * NS:
                continue
            directory.remove()
        except HoldfastError:
            continue  # damaged, or a controller is still about: not ours to delete
        deleted.append(directory.name)
    return deleted


def create_job(home: Home, job: TrainingJob, spec_directory: str | Path) -> JobDirectory:
    """A new job's directory. Raises UserError, saying what there is, when the name is taken."""
    try:
        return home.create(job, spec_directory)
    except NameTaken as taken:
        raise UserError(str(_taken(home, taken.directory))) from None


def _taken(home: Home, directory: JobDirectory) -> Problem:
    name, damaged = directory.name, False
    try:
        state: str = read_view(directory).state
    except HoldfastError as error:
        state, damaged = f"unreadable ({error})", isinstance(error, Damaged)
    if directory.controller_alive():
        fix = f"watch it with `holdfast status {name}`, or choose another metadata.name"
    elif state in ("succeeded", "failed", "cancelled"):
        fix = (
            f"remove it with `holdfast delete {name}`, or choose another metadata.name (to go on "
            f"from its checkpoints: `holdfast delete {name} --keep-checkpoints DIRECTORY`)"
        )
    elif damaged:
        fix = (
            f"restore it from a copy, remove it with `holdfast delete {name}`, or choose another "
            f"metadata.name"
        )
    elif state.startswith("unreadable"):
        fix = (
            "make it readable (a newer Holdfast may have written it), or choose another "
            "metadata.name"
        )
    else:
        fix = (
            f"its controller is gone: take it over with `holdfast run --attach {name}`, or "
            f"choose another metadata.name"
        )
    where = f"{name}, which exists in {home.path} and is {state}"
    return Problem("metadata.name", where, "a name that is free", fix)
