"""The code of a job that runs in a cluster: the directory of its spec, if what it runs is in it.

Without code here (a recipe; a script or an absolute working directory that only the nodes have)
nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path, PurePath

from ..api.launchers import Program
from ..api.v1alpha1 import TrainingJob
from ..errors import UserError
from . import code_files
from .code_files import Code
from .job_checks import check_submission
from .output import stderr


def with_code(job: TrainingJob, directory: Path, source: str) -> tuple[TrainingJob, Code | None]:
    """The job, and the code of its spec's directory if it runs that. Raises UserError and
    SpecError."""
    if job.spec.code is not None or not _is_here(job, directory):
        return job, None
    code = _packed(job, directory, source)
    spec = job.spec.model_copy(update={"code": code.name})
    return job.model_copy(update={"spec": spec}), code


def edited(job: TrainingJob, directory: Path) -> Code:
    """The edited code of a running job. Raises UserError, SpecError."""
    if job.spec.entrypoint.recipe is not None:
        got = f"job {job.name}, which runs a recipe"
        raise UserError.of("job", got, "one that runs code of yours")
    if not _is_here(job, directory):
        program = job.spec.entrypoint.program
        what = program.script or program.module or " ".join(program.words)
        got = f"job {job.name}, which runs {what}, from {directory}"
        raise UserError.of("FILE", got, "its directory as the current one, or as FILE's")
    code = _packed(job, directory, job.name)
    if code.name == job.spec.code:
        got = f"the code in {directory}, which job {job.name} runs already"
        raise UserError.of("FILE", got, "code that was edited")
    return code


def _packed(job: TrainingJob, directory: Path, source: str) -> Code:
    check_submission(job, directory, source, ships=True)
    code = code_files.pack(directory)
    check_uploaded(job, directory, code.files)
    print_remarks(code.remarks)
    return code


def check_uploaded(job: TrainingJob, directory: Path, uploaded: Collection[str]) -> None:
    """Raises UserError for a script of the directory that is not uploaded."""
    work, entry = PurePath(job.spec.working_directory), job.spec.entrypoint
    if _is_of_nodes(work):
        return
    root, script = directory.resolve(), entry.program.script
    if script is None or _is_of_nodes(PurePath(script)):
        return
    whole = root / work / script
    path = whole.parent.resolve() / whole.name  # without `sub/..`; the file may be a link
    if not path.is_relative_to(root) or path.relative_to(root).as_posix() not in uploaded:
        got, expected = f"{script}, which is not uploaded", "a file that .gitignore does not name"
        raise UserError.of(entry.script_field, got, f"{expected}, with no name of secrets")


def _is_of_nodes(path: PurePath) -> bool:
    return path.is_absolute() or str(path)[0] == "~"


def print_remarks(remarks: Iterable[str]) -> None:
    for remark in remarks:
        stderr().print(remark, markup=False, soft_wrap=True)


def _is_here(job: TrainingJob, directory: Path) -> bool:
    """True if what the job runs is in the spec's directory here."""
    written = PurePath(job.spec.working_directory)
    if job.spec.entrypoint.recipe is not None or _is_of_nodes(written):
        return False
    return any(
        (directory / written / name).exists() for name in _names(job.spec.entrypoint.program)
    )


def _names(program: Program) -> list[str]:
    """Relative paths, of which at least one exists where the program is."""
    paths = [program.script] if program.script is not None else []
    if program.module is not None:
        top = program.module.split(".")[0]
        paths += [top, f"{top}.py"]
    paths += [word for word in program.words if not word.startswith("-")]
    return [name for name in paths if not PurePath(name).is_absolute()]


def describe(code: Code) -> str:
    size = len(code.archive)
    much = f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{-(-size // 1024)} KiB"
    return f"code {code.name[:12]} uploaded: {len(code.files)} files, {much} compressed"


def notes(job: TrainingJob, code: Code | None) -> list[str]:
    """Notes for the user about a job that was created."""
    if code is not None:
        return [f"{describe(code)}; the workers run in a copy of it"]
    if job.spec.entrypoint.recipe is not None or job.spec.code is not None:
        return []
    return ["no code is uploaded, since it is not beside the spec: the job runs what its image has"]
