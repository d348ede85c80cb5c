"""Checks of a job against this machine before it starts: files, directories and storage.

The models of the spec have checked everything else. Nothing is changed but a probe file in the
checkpoint path, which is removed.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..api.v1alpha1 import TrainingJob, load_job
from ..backends.devices import found_here, gpus
from ..errors import Problem, SpecError
from ..planner.gpus import GpusFound, TooFewGpus, resolve
from ..protocol import files
from ..protocol.facts import NodeFacts
from ..protocol.files import make_directory
from ..runtime.checkpoint_store.options import (
    CHECKPOINT_FIELD,
    LOCAL_SCHEMES,
    job_environment,
    missing_driver,
    storage_place,
)
from . import entrypoint_checks
from .entrypoint_checks import cut


def load_checked(path: Path, directory: Path | None = None) -> TrainingJob:
    """The job in a file, checked against the models and against this machine. `directory`: of the
    spec, where it is not that of the file.

    Raises UserError or SpecError.
    """
    job = load_job(path)
    check(job, directory or path.absolute().parent, source=str(path))
    return job


def check(job: TrainingJob, spec_directory: Path, source: str = "") -> None:
    """Raises SpecError with everything that cannot work on this machine."""
    with job_environment(job):
        problems = list(_problems(job, spec_directory))
    if problems:
        raise SpecError(problems, source)


def check_submission(job: TrainingJob, spec_directory: Path, source: str, *, ships: bool) -> None:
    """Raises SpecError for a job that cannot work when it is submitted from here and runs in a
    cluster: with `ships`, in an uploaded copy of the spec's directory. What only the cluster has is
    checked there."""
    problems = []
    path, script = job.spec.checkpoint.path, job.spec.entrypoint.program.script
    field = job.spec.entrypoint.script_field
    if path is not None and not _is_same_everywhere(path):
        expected = "an absolute path or a URL, since the job does not run in the spec's directory"
        fix = "use a directory that all nodes share, or an object store"
        problems.append(Problem(CHECKPOINT_FIELD, path, expected, fix))
    work = Path(job.spec.working_directory)
    if script is not None and ships and not _is_same_everywhere(str(work / script)):
        is_here = not job.spec.entrypoint.program.is_foreign
        problems += entrypoint_checks.script(spec_directory / work, script, field, compiled=is_here)
        place = (spec_directory / work / script).resolve() if not problems else spec_directory
        if not place.is_relative_to(spec_directory.resolve()):
            expected = f"a file below {spec_directory}, the only directory that is uploaded"
            problems.append(Problem(field, f"{script} ({place})", expected))
    for where, data in _sources(job):
        if not _is_same_everywhere(data):
            expected = "stdlib, or an absolute path on the nodes: data is not uploaded"
            problems.append(Problem(where, data, expected))
    if problems:
        raise SpecError(problems, source)


def _sources(job: TrainingJob) -> Iterator[tuple[str, str]]:
    """(field, file or directory) of the data of a recipe."""
    if recipe := job.spec.entrypoint.recipe:
        for name, source in recipe.config.sources():
            yield f"spec.entrypoint.recipe.config.{name}", source


def _code(job: TrainingJob) -> Iterator[Problem]:
    if job.spec.code is not None:
        expected = "nothing, for a job that does not run on Kubernetes"
        yield Problem("spec.code", f"{job.spec.code[:12]}...", expected, "remove the field")


def _is_same_everywhere(path: str) -> bool:
    """True if the path does not depend on the directory of the spec file."""
    scheme, is_url, rest = path.partition("://")
    if is_url and scheme not in LOCAL_SCHEMES:
        return True
    return (rest if is_url else path).startswith(("/", "~"))


def _problems(job: TrainingJob, spec_directory: Path) -> Iterator[Problem]:
    yield from _code(job)
    if (recipe := job.spec.entrypoint.recipe) and (problem := recipe.missing()):
        yield problem
    field, written = "spec.workingDirectory", job.spec.working_directory
    try:
        work = files.resolve(spec_directory, written)
        why = "" if work.is_dir() else f"{work} is not a directory"
    except OSError as error:
        why = str(error.strerror)
    if why:
        yield Problem(field, f"{cut(written)} ({why})", "a directory, relative to the spec file")
        return
    yield from entrypoint_checks.problems(job, work)
    for name, source in _sources(job):
        yield from _data(work, source, name)
    if job.spec.checkpoint.path is not None:
        yield from _storage(job.spec.checkpoint.path, spec_directory)


def _data(work: Path, written: str, field: str) -> Iterator[Problem]:
    expected = "stdlib, or a file or directory, relative to spec.workingDirectory"
    try:
        path = files.resolve(work, written)
        there = path.exists()
    except OSError as error:
        yield Problem(field, f"{cut(written)} ({error.strerror})", expected)
        return
    if not there:
        yield Problem(field, f"{written} ({path} does not exist)", expected)
    elif not os.access(path, os.R_OK):
        yield Problem(field, f"{written} (no permission)", "readable data")
    elif path.is_dir() and not any(child.is_file() for child in path.rglob("*")):
        yield Problem(field, f"{written} ({path} contains no file)", "a directory with files")
    elif path.is_file() and path.stat().st_size == 0:
        yield Problem(field, f"{written} ({path} is empty)", "a file with data")


def _missing(path: Path) -> list[Path]:
    """Missing ones of a path and its parents, deepest first."""
    return [p for p in (path, *path.parents) if not p.exists()]


def _storage(path: str, spec_directory: Path) -> Iterator[Problem]:
    """Write, list and delete a file, as agents and controller will do."""
    import fsspec

    field, fix = CHECKPOINT_FIELD, "choose another path, or make this one writable"
    created: list[Path] = []
    try:
        url = storage_place(path, spec_directory)
        created = _missing(Path(url)) if "://" not in path else []
        files, root = fsspec.core.url_to_fs(url)
        make_directory(files, root)
        name = f"{root.rstrip('/')}/.holdfast-probe-{uuid.uuid4().hex}"
        files.pipe_file(name, b"probe")
        files.rm_file(name)
        with suppress(FileNotFoundError):  # object stores have no empty directories
            files.ls(root, detail=False)
        for directory in created:
            directory.rmdir()
    except ImportError as error:
        yield missing_driver(path, error)
    except ValueError as error:
        yield Problem(field, f"{path} ({error})", "a directory or a URL that fsspec knows")
    except Exception as error:  # each driver raises its own exceptions
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield Problem(
            field, f"{cut(path)} ({why})", "a directory or URL that can be written and listed", fix
        )


def with_local_gpus(job: TrainingJob, source: str) -> tuple[TrainingJob, str]:
    """The job with the number of GPUs that it would get on this machine, and what `gpu: auto` was
    decided from; empty: the spec has the number. Raises SpecError."""
    gpus_here = found_here(job)
    try:
        resolved, why = resolve(job, gpus_here)
    except TooFewGpus:
        why = f"{gpus_here.what}: `holdfast run` rejects the job on this machine"
        resolved, why = resolve(job, GpusFound(0, why, wanted=True))
    except SpecError as error:
        raise SpecError(error.problems, source) from None
    return resolved, f"{why}; in a cluster its nodes decide" if why else ""


def local_facts(slots: int) -> NodeFacts:
    """This machine as a node of the local backend, for `holdfast spec plan`."""
    from holdfast.orchestrator.protocol.environment import chosen_cache
    from holdfast.orchestrator.protocol.hardware import cpus, memory_bytes, processor, rdma_devices
    from holdfast.orchestrator.runtime.job_directory import Home

    return NodeFacts(
        hostname=socket.gethostname(),
        address="127.0.0.1",
        data_port=0,
        slots=slots,
        cpus=cpus(),
        processor=processor(),
        memory_bytes=memory_bytes(),
        gpus=gpus(),
        hcas=rdma_devices(),
        cache_directory=chosen_cache(os.environ, str(Home().cache)),
    )
