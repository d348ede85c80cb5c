"""`holdfast checkpoint list | save | verify | export | adopt`: what is in the storage tier.

Owns: these verbs. Must not: read tensors; `python -m holdfast.workers.checkpoint` does, because
the control plane never imports torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import JsonOption, Target, with_target

if TYPE_CHECKING:
    from holdfast.orchestrator.errors import UserError
    from holdfast.orchestrator.protocol.manifest import Manifest
    from holdfast.orchestrator.runtime.observe.view import CheckpointView, JobView

app = typer.Typer(
    no_args_is_help=True,
    help="""List, save, verify, export and adopt the checkpoints of a job, alive or not.

JOB_OR_PATH is a job's name, or the directory or URL of a storage tier (spec.checkpoint.path).""",
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="JOB_OR_PATH", help="A job, or a storage tier.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Of this step.", show_default="the newest")
]


@app.command("list")
@with_target
def list_(target: TargetArgument, as_json: JsonOption = False, *, place: Target) -> None:
    """List committed checkpoints, oldest first.

    Example: `holdfast checkpoint list stdlib-bytes`
    """
    from ..output import columns, print_json, size, stdout

    if _is_path(target):
        path = _tier(target)
        manifests = _manifests(path)
    else:
        job = _find(target, place)
        found = job.manifests()
        if found is None:
            _list_view(job.view(), as_json)
            return
        path, manifests = found
    if as_json:
        print_json(manifests)
        return
    if not manifests:
        typer.echo(f"no committed checkpoint in {path}", err=True)
        return
    table = columns("step", "generation", "mesh", "files", "size", "committed", "directory")
    for manifest in manifests:
        table.add_row(
            str(manifest.step),
            str(manifest.generation),
            manifest.mesh.describe(),
            str(len(manifest.files)),
            size(manifest.num_bytes),
            manifest.committed_at,
            manifest.directory,
        )
    stdout().print(table)


def _list_view(view: JobView, as_json: bool) -> None:
    """What the job's controller says of them, where they cannot be read from here."""
    from ..output import columns, date, print_json, size, stdout

    if as_json:
        print_json([{**_facts(one), "path": view.checkpoint_path} for one in view.checkpoints])
        return
    if not view.checkpoints:
        where = f" in {view.checkpoint_path}" if view.checkpoint_path else ""
        typer.echo(f"no committed checkpoint{where}", err=True)
        return
    table = columns("step", "generation", "size", "committed", "path")
    for one in view.checkpoints:
        table.add_row(
            str(one.step),
            str(one.generation),
            size(one.num_bytes),
            date(one.committed_ns) if one.committed_ns else "",
            view.checkpoint_path,
        )
    stdout().print(table)


def _facts(checkpoint: CheckpointView) -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(checkpoint)
    return facts


@app.command()
@with_target
def save(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A running job.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it is committed; exit code 1 if it will not be.")
    ] = False,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Write the running job's next state to storage now, whatever its cadence.

    Example: `holdfast checkpoint save stdlib-bytes --wait`
    """
    from ..output import print_json
    from ..save_wait import save_and_wait

    answer = save_and_wait(place, job) if wait else place.find(job).request("checkpoint")
    if as_json:
        print_json({"job": job, "verb": "checkpoint", "detail": answer.detail, **answer.body})
    else:
        typer.echo(f"job {job}: {answer.detail}")


@app.command()
@with_target
def verify(
    target: TargetArgument,
    step: StepOption = None,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Read every byte of a checkpoint and compare its checksums; exit code 1 if it is damaged."""
    from ..output import plural, size

    with _storage(target, place) as path:
        code, body = _run(["verify", *_arguments(target, path, step)], as_json)
    if not as_json:
        where = f"{body['directory']} in {body['path']}"
        for problem in body["problems"]:
            typer.echo(f"damaged: {problem}")
        files, tensors = plural(body["num_files"], "file"), plural(body["num_tensors"], "tensor")
        what = "is good" if body["ok"] else "must not be used"
        typer.echo(f"{where} {what}: {files}, {tensors}, {size(body['num_bytes'])} read")
    raise typer.Exit(code)


@app.command()
@with_target
def export(
    target: TargetArgument,
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A directory; made if needed.")
    ],
    step: StepOption = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state as well.")
    ] = False,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Write the model of a checkpoint as plain safetensors, whatever mesh wrote it.

    Example: `holdfast checkpoint export stdlib-bytes ./model`
    """
    from ..output import size

    more = ["--to", str(destination), *(["--optimizer"] * optimizer)]
    with _storage(target, place) as path:
        code, body = _run(["export", *_arguments(target, path, step), *more], as_json)
    if not as_json:
        for file in body["files"]:
            typer.echo(file)
        typer.echo(f"step {body['step']}: {size(body['num_bytes'])} of safetensors", err=True)
    raise typer.Exit(code)


@app.command()
@with_target
def adopt(
    target: TargetArgument,
    job: Annotated[
        str, typer.Option("--job", metavar="[NAMESPACE/]NAME", help="Whose they become.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Give committed checkpoints to another job, which then goes on from them.

    A job goes on from its own checkpoints only, and on Kubernetes it is called NAMESPACE/NAME. So
    this is how a job gets another name, or moves from one machine or Ray to Kubernetes. Nothing is
    copied, and the job that wrote them must have ended.

    Example: `holdfast checkpoint adopt s3://bucket/my-job --job team/my-job`
    """
    from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

    from ..output import plural, print_json

    _expect_key(job)
    if not _is_path(target):
        _expect_ended(target, place.find(target).view().state)
    with _storage(target, place) as path:
        found = _manifests(path)
        if not found:
            raise _nothing_in(path, target)
        others = [one for one in found if one.job != job]
        whose = ", ".join(sorted({one.job for one in others}))
        what = f"{plural(len(others), 'checkpoint')} of {whose} in {path}"
        if others and not yes:
            typer.confirm(f"Give {what} to {job}? {whose} must have ended.", abort=True)
        CheckpointStore(path, job).adopt(others)
    if as_json:
        print_json({"path": path, "job": job, "adopted": [one.directory for one in others]})
    elif not others:
        typer.echo(f"{plural(len(found), 'checkpoint')} in {path}: all are those of {job} already")
    else:
        typer.echo(f"{what}: those of {job} now; run it with checkpoint.path: {path}")


def _expect_key(job: str) -> None:
    """Raises UserError for what no job can be called."""
    from holdfast.orchestrator.api.v1alpha1.job import NAME_PATTERN
    from holdfast.orchestrator.errors import Problem, UserError

    namespace, slash, name = job.rpartition("/")
    parts = [(name, 52), *([(namespace, 63)] if slash else [])]
    if not all(re.fullmatch(NAME_PATTERN, part) and len(part) <= most for part, most in parts):
        expected = "NAME, or NAMESPACE/NAME of a job on Kubernetes"
        raise UserError(str(Problem("--job", job, expected)))


def _expect_ended(job: str, state: str) -> None:
    """Raises UserError for a job that may still write."""
    from holdfast.orchestrator.errors import Problem, UserError

    from ..render import FINISHED

    if state not in FINISHED:
        fix = f"holdfast cancel {job}"
        raise UserError(str(Problem("job", f"{job}, {state}", "a job that has ended", fix)))


def _nothing_in(path: str, target: str) -> UserError:
    from holdfast.orchestrator.errors import Problem, UserError

    whose = path if _is_path(target) else target
    return UserError(str(Problem(whose, f"no committed checkpoint in {path}", "at least one")))


def _arguments(target: str, path: str, step: int | None) -> list[str]:
    """The storage tier and the step, as arguments. Raises UserError for an unknown step."""
    from holdfast.orchestrator.errors import Problem, UserError

    steps = [manifest.step for manifest in _manifests(path, target)]
    if not steps:
        raise _nothing_in(path, target)
    if step is None:
        return [path]
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(str(Problem("--step", str(step), f"one of {known}")))
    return [path, "--step", str(step)]


def _is_path(target: str) -> bool:
    return "://" in target or "/" in target or target in (".", "..")


def _tier(target: str) -> str:
    """Directory or URL of a storage tier. Raises UserError."""
    from holdfast.orchestrator.errors import Problem, UserError
    from holdfast.orchestrator.runtime.checkpoint_store.job_environment import storage_place

    if "://" not in target and not _is_directory(target):
        raise UserError(str(Problem("JOB_OR_PATH", target, "a directory, a URL or a job")))
    return storage_place(target, Path.cwd())


def _is_directory(target: str) -> bool:
    """Whatever cannot be one, such as a name that is too long, is none."""
    return os.path.isdir(os.path.expanduser(target))  # noqa: PTH111, PTH112


def _find(target: str, place: Target) -> Any:
    """The job of that name. Raises UserError."""
    from holdfast.orchestrator.errors import UserError

    try:
        return place.find(target)
    except UserError as error:
        if not _is_directory(target):
            raise
        raise UserError(f"{error}; for the directory write ./{target}") from None


@contextmanager
def _storage(target: str, place: Target) -> Iterator[str]:
    """Directory or URL of the storage tier. A job's is opened with its spec.env, any other with
    this process' environment."""
    if _is_path(target):
        yield _tier(target)
        return
    with _find(target, place).storage() as path:
        yield path


def _manifests(path: str, target: str = "") -> list[Manifest]:
    """`target`: the job whose they are; a path is any job's."""
    from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

    return CheckpointStore(path, "" if _is_path(target) else target).manifests()


def _run(arguments: list[str], as_json: bool) -> tuple[int, dict[str, Any]]:
    """Its exit code and the JSON it printed. Raises HoldfastError or UserError as it reports."""
    import json

    from holdfast.orchestrator.errors import HoldfastError, UserError
    from holdfast.orchestrator.protocol import python_command

    done = subprocess.run(
        [*python_command.start("holdfast.workers.checkpoint"), *arguments],
        env={**os.environ, "PYTHONPATH": python_command.import_path()},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        body: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise HoldfastError(f"{arguments[0]}: failed with exit code {done.returncode}") from None
    if "error" in body:
        raise (UserError if done.returncode == 2 else HoldfastError)(body["error"])
    if as_json:
        sys.stdout.write(done.stdout)
    return done.returncode, body
