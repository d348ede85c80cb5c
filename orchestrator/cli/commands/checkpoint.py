"""`holdfast checkpoint list | save | verify | repair | export | adopt`: checkpoints in storage.

Commands that read tensors run `python -m holdfast.workers.checkpoint` in a child process, because
the control plane never imports torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError

from ..options import JsonOption, Target, with_target
from ..output import columns, date, plural, print_json, size, stderr, stdout

if TYPE_CHECKING:
    from holdfast.orchestrator.protocol.manifest import Manifest
    from holdfast.orchestrator.runtime.observe.view import JobView

    from ...protocol.messages import Reply
    from ..targets.remote_job import RemoteJob

app = typer.Typer(
    no_args_is_help=True,
    help="""List, save, verify, repair, export and adopt the checkpoints of a job.

JOB_OR_PATH is the name of a job, or the directory or URL of its checkpoints
(spec.checkpoint.path).""",
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="JOB_OR_PATH", help="A job, or a directory or URL.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Steps that it has.", show_default="the newest")
]


@app.command("list")
@with_target
def list_(job_or_path: TargetArgument, as_json: JsonOption = False, *, target: Target) -> None:
    """List committed checkpoints, oldest first.

    Example: `holdfast checkpoint list stdlib-bytes`
    """
    if _is_path(job_or_path):
        path = _tier(job_or_path)
        manifests = _manifests(path)
    else:
        job = _find(job_or_path, target)
        listed = job.manifests()
        if listed is None:
            _list_view(job.view(), as_json)
            return
        path, manifests = listed
    if as_json:
        print_json(manifests)
        return
    if not manifests:
        typer.echo(f"no committed checkpoint in {path}", err=True)
        return
    names = ("steps", "generation", "mesh", "files", "size", "committed", "directory")
    table = columns(*names, leaves_out=("generation", "files", "mesh", "committed"))
    for manifest in manifests:
        table.add_row(
            str(manifest.step + 1), str(manifest.generation), manifest.mesh.describe(),
            str(len(manifest.files)), size(manifest.num_bytes), manifest.committed_at,
            manifest.directory,
        )  # fmt: skip
    stdout().print(table)


def _list_view(view: JobView, as_json: bool) -> None:
    """The list of the job's controller, for storage that this process cannot read."""
    if as_json:
        import msgspec

        rows: list[dict[str, Any]] = msgspec.to_builtins(view.checkpoints)
        print_json([{**row, "path": view.checkpoint_path} for row in rows])
        return
    if not view.checkpoints:
        where = f" in {view.checkpoint_path}" if view.checkpoint_path else ""
        typer.echo(f"no committed checkpoint{where}", err=True)
        return
    table = columns("steps", "generation", "size", "committed", "path")
    for checkpoint in view.checkpoints:
        at = date(checkpoint.committed_ns) if checkpoint.committed_ns else ""
        cells = (str(checkpoint.generation), size(checkpoint.num_bytes), at, view.checkpoint_path)
        table.add_row(str(checkpoint.step + 1), *cells)
    stdout().print(table)


@app.command()
@with_target
def save(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A running job.")],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is committed; exit code 1 if that fails.")
    ] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Write a checkpoint of the running job to storage now.

    Example: `holdfast checkpoint save stdlib-bytes --wait`
    """
    answer = save_and_wait(target, job) if wait else target.find(job).request("checkpoint")
    if as_json:
        print_json({"job": job, "verb": "checkpoint", "detail": answer.detail, **answer.body})
    else:
        typer.echo(f"job {job}: {answer.detail}")


POLL_S = 0.5
NO_CONTROLLER_S = 60.0
"""Seconds without a controller, which alone commits; a new one usually comes within seconds."""
BETWEEN_GENERATIONS = ("starting", "recovering")
"""The controller rejects requests for a checkpoint now and accepts them again within seconds."""


def save_and_wait(target: Target, name: str) -> Reply:
    """Wait until a checkpoint of the requested step, or of a later one, is committed.

    A request ends with its generation, so each new generation gets a new request. Raises
    HoldfastError when the job does not train any more or has no controller, and UserError when the
    controller rejects the request.
    """
    from ...protocol.messages import Reply

    step: int | None = None
    generation = 0
    """The generation that has the request; 0: none."""
    absent_since: float | None = None
    printed: set[str] = set()
    while True:
        job = target.find(name)
        view = job.view()
        newest = max((checkpoint.step for checkpoint in view.checkpoints), default=-1)
        if step is not None and newest >= step:
            text = f"the state after {plural(newest + 1, 'step')} is committed"
            return Reply(ok=True, detail=text, body={"step": newest})
        if step is not None and (view.state == "suspended" or view.state in TERMINAL):
            raise HoldfastError(_not_committed(view, step, f"it is {view.state}"))
        absent_since = None if view.controller_alive else absent_since or time.monotonic()
        if absent_since is not None and time.monotonic() - absent_since > NO_CONTROLLER_S:
            raise HoldfastError(_not_committed(view, step, "it has had no controller for a minute"))
        first = generation == 0 and view.state not in BETWEEN_GENERATIONS
        if first or (view.state == "running" and view.generation != generation):
            requested = _request_save(job)
            if requested is not None:
                step, generation = requested, view.generation
        problem = f"not committed yet: {view.storage_problem}" if view.storage_problem else ""
        for text in {*job.remarks(view), problem} - {"", *printed}:
            stderr().print(text, soft_wrap=True)
            printed.add(text)
        time.sleep(POLL_S)


def _request_save(job: RemoteJob) -> int | None:
    """The requested step. None: the generation ended meanwhile, and the next one gets the
    request."""
    try:
        return int(job.request("checkpoint").body["step"])
    except HoldfastError:
        if job.view().state in BETWEEN_GENERATIONS:
            return None
        raise


def _not_committed(view: JobView, step: int | None, what: str) -> str:
    newest = max((checkpoint.step for checkpoint in view.checkpoints), default=-1)
    has = f"the newest has {plural(newest + 1, 'step')}" if newest >= 0 else "there is none yet"
    wanted = "a new checkpoint" if step is None else f"the state after {plural(step + 1, 'step')}"
    return f"job {view.name}: {what}, so {wanted} was not committed; {has}"


@app.command()
@with_target
def verify(
    job_or_path: TargetArgument,
    steps: StepsOption = None,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Read every byte of a checkpoint and compare its checksums; exit code 1 if it is damaged."""
    with _storage(job_or_path, target) as path:
        code, body = _run(["verify", *_arguments(job_or_path, path, steps)], as_json)
    if not as_json:
        where = f"{body['directory']} in {body['path']}"
        for problem in body["problems"]:
            typer.echo(f"damaged: {problem}")
        files, tensors = plural(body["num_files"], "file"), plural(body["num_tensors"], "tensor")
        what = "is intact" if body["ok"] else "is damaged: do not use it"
        own = body["num_rank_states"]
        ranks = f", state of {plural(own, 'rank')} of its own" if own else ""
        typer.echo(f"{where} {what}: {files}, {tensors}{ranks}, {size(body['num_bytes'])} read")
    raise typer.Exit(code)


@app.command()
@with_target
def repair(
    job_or_path: TargetArgument,
    steps: StepsOption = None,
    job_name: Annotated[
        str,
        typer.Option(
            "--job", metavar="[NAMESPACE/]NAME", help="Name of the job, if no manifest has it."
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Write a new checkpoint from the intact parts of a damaged one, and let the job continue.

    A damaged part of a tensor comes from the newest older checkpoint that has it intact, or the
    optimizer's state of that parameter begins at zero; model values are never made up. The damaged
    checkpoint stays as it is. The job must be suspended or have ended; a job that is held for its
    checkpoints resumes.

    Example: `holdfast checkpoint repair my-job`
    """
    job = None if _is_path(job_or_path) else _find(job_or_path, target)
    if job is not None:
        _expect_idle(job_or_path, job.view().state)
    more = [] if steps is None else ["--step", str(steps - 1)]
    if job_name:
        _expect_key(job_name)
        more += ["--job", job_name]
    with _storage(job_or_path, target) as path:
        code, body = _run(["repair", path, *more, "--dry-run"], False)
        if not as_json:
            _show_repair(body)
        elif code != 0:
            print_json(body)
        if code == 0:
            if not yes:
                typer.confirm("Write it?", abort=True)
            code, body = _run(["repair", path, *more], as_json)
    if code == 0 and not as_json:
        typer.echo(f"written: {body['written']} in {body['path']}, {size(body['num_bytes'])}")
    if code == 0 and job is not None and job.view().hold:
        answer = job.request("resume")
        if not as_json:
            typer.echo(f"job {job_or_path}: {answer.detail}")
    raise typer.Exit(code)


SHOWN_PARTS = 20


def _show_repair(body: dict[str, Any]) -> None:
    """Show what would be replaced, or why the checkpoint cannot be repaired."""
    for problem in body["problems"]:
        typer.echo(f"cannot be repaired: {problem}")
    if body["problems"]:
        typer.echo("name an older checkpoint with --steps, or begin at step 0: holdfast resume JOB "
                   "--start-over", err=True)  # fmt: skip
        return
    replaced = body["replaced"]
    typer.echo(f"{body['directory']} can be repaired; {plural(len(replaced), 'part')} replaced")
    for part in replaced[:SHOWN_PARTS]:
        source = "zeros" if part["source"] == "zeros" else f"from {part['source']}"
        typer.echo(f"  {part['file']}: {part['tensor']}: {source}")
    if len(replaced) > SHOWN_PARTS:
        typer.echo(f"  and {len(replaced) - SHOWN_PARTS} more; the manifest lists all")


def _expect_idle(job: str, state: str) -> None:
    """Raises UserError for a job that may write checkpoints now."""
    if state != "suspended" and state not in TERMINAL:
        fix = f"holdfast suspend {job}"
        raise UserError.of("job", f"{job}, {state}", "a job that is suspended or has ended", fix)


@app.command()
@with_target
def export(
    job_or_path: TargetArgument,
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A directory; created if missing.")
    ],
    steps: StepsOption = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Export the optimizer state too.")
    ] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Export the model of a checkpoint as safetensors, whatever mesh wrote it.

    Example: `holdfast checkpoint export stdlib-bytes ./model`
    """
    more = ["--to", str(destination), *(["--optimizer"] * optimizer)]
    with _storage(job_or_path, target) as path:
        code, body = _run(["export", *_arguments(job_or_path, path, steps), *more], as_json)
    if not as_json:
        for file in body["files"]:
            typer.echo(file)
        of = f"of safetensors, after {plural(body['step'] + 1, 'step')}"
        typer.echo(f"{size(body['num_bytes'])} {of}", err=True)
    raise typer.Exit(code)


@app.command()
@with_target
def adopt(
    job_or_path: TargetArgument,
    job: Annotated[
        str,
        typer.Option(
            "--job", metavar="[NAMESPACE/]NAME", help="The job that gets the checkpoints."
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Give committed checkpoints to another job, which then continues from them.

    A job continues only from its own checkpoints, and a job on Kubernetes is named NAMESPACE/NAME.
    Use this to rename a job, or to move it from one machine or Ray to Kubernetes. No data is
    copied: the new job owns the checkpoints. The job that wrote them must have ended.

    Example: `holdfast checkpoint adopt s3://bucket/my-job --job team/my-job`
    """
    from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

    _expect_key(job)
    if not _is_path(job_or_path):
        _expect_ended(job_or_path, target.find(job_or_path).view().state)
    with _storage(job_or_path, target) as path:
        manifests = _manifests(path)
        if not manifests:
            raise _nothing_in(path, job_or_path)
        others = [m for m in manifests if m.job != job]
        owners = ", ".join(sorted({m.job for m in others}))
        what = f"{plural(len(others), 'checkpoint')} of {owners} in {path}"
        if others and not yes:
            typer.confirm(f"Give {what} to {job}? {owners} must have ended.", abort=True)
        CheckpointStore(path, job).adopt(others)
    if as_json:
        print_json({"path": path, "job": job, "adopted": [m.directory for m in others]})
    elif not others:
        typer.echo(f"{plural(len(manifests), 'checkpoint')} in {path}: all belong to {job} already")
    else:
        typer.echo(f"{what}: now belong to {job}; run it with spec.checkpoint.path: {path}")


def _expect_key(job: str) -> None:
    """Raises UserError for an invalid job name."""
    from holdfast.orchestrator.api.v1alpha1.job import NAME_PATTERN

    namespace, slash, name = job.rpartition("/")
    parts = [(name, 52), *([(namespace, 63)] if slash else [])]
    if not all(re.fullmatch(NAME_PATTERN, part) and len(part) <= most for part, most in parts):
        raise UserError.of("--job", job, "NAME, or NAMESPACE/NAME of a job on Kubernetes")


def _expect_ended(job: str, state: str) -> None:
    """Raises UserError for a job that may still write checkpoints."""
    if state not in TERMINAL:
        fix = f"holdfast cancel {job}"
        raise UserError.of("job", f"{job}, {state}", "a job that has ended", fix)


def _nothing_in(path: str, job_or_path: str) -> UserError:
    whose = path if _is_path(job_or_path) else job_or_path
    return UserError.of(whose, f"no committed checkpoint in {path}", "at least one")


def _arguments(job_or_path: str, path: str, steps: int | None) -> list[str]:
    """Storage tier and step as command-line arguments. Raises UserError for an unknown step."""
    listed = [manifest.step + 1 for manifest in _manifests(path, job_or_path)]
    if not listed:
        raise _nothing_in(path, job_or_path)
    if steps is None:
        return [path]
    if steps not in listed:
        choices = ", ".join(map(str, listed))
        raise UserError.of("--steps", str(steps), f"one of {choices}")
    return [path, "--step", str(steps - 1)]


def _is_path(job_or_path: str) -> bool:
    return "://" in job_or_path or "/" in job_or_path or job_or_path in (".", "..")


def _tier(job_or_path: str) -> str:
    """Directory or URL of a storage tier. Raises UserError."""
    from holdfast.orchestrator.runtime.checkpoint_store.options import storage_place

    if "://" not in job_or_path and not _is_directory(job_or_path):
        raise UserError.of("JOB_OR_PATH", job_or_path, "a directory, a URL or a job")
    return storage_place(job_or_path, Path.cwd())


def _is_directory(job_or_path: str) -> bool:
    """False also for a name that no file can have, such as one that is too long."""
    return os.path.isdir(os.path.expanduser(job_or_path))  # noqa: PTH111, PTH112


def _find(job_or_path: str, target: Target) -> RemoteJob:
    """The job of that name. Raises UserError."""
    try:
        return target.find(job_or_path)
    except UserError as error:
        if not _is_directory(job_or_path):
            raise
        raise UserError(f"{error}; to name the directory, write ./{job_or_path}") from None


@contextmanager
def _storage(job_or_path: str, target: Target) -> Iterator[str]:
    """Directory or URL of the storage tier. That of a job is opened with its spec.env, any other
    with the environment of this process."""
    if _is_path(job_or_path):
        yield _tier(job_or_path)
        return
    with _find(job_or_path, target).storage() as path:
        yield path


def _manifests(path: str, job_or_path: str = "") -> list[Manifest]:
    """Manifests of the job `job_or_path`; of all jobs if that is a path."""
    from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

    return CheckpointStore(path, "" if _is_path(job_or_path) else job_or_path).manifests()


def _run(arguments: list[str], as_json: bool) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON output of the child process. Raises the error that it reports."""
    import json

    from holdfast.orchestrator.protocol import python_command, training_packages

    if missing := training_packages.problem():
        raise UserError(f"checkpoint {arguments[0]}: {missing}")
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
