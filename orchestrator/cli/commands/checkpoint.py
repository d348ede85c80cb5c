"""`holdfast checkpoint list | save | verify | export`: what is in the storage tier.

Owns: these verbs. Must not: read tensors; `python -m workers.checkpoint` does, because the control
plane never imports torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import HomeOption, JsonOption

if TYPE_CHECKING:
    from ...protocol.manifest import Manifest

app = typer.Typer(
    no_args_is_help=True,
    help="""List, save, verify and export the checkpoints of a job, alive or not.

JOB_OR_PATH is a job's name, or the directory or URL of a storage tier (spec.checkpoint.path).""",
)

TargetArgument = Annotated[
    str, typer.Argument(metavar="JOB_OR_PATH", help="A job, or a storage tier.")
]
StepOption = Annotated[
    int | None, typer.Option("--step", help="Of this step.", show_default="the newest")
]


@app.command("list")
def list_(target: TargetArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List committed checkpoints, oldest first.

    Example: `holdfast checkpoint list stdlib-bytes`
    """
    from ..output import columns, print_json, size, stdout

    with _storage(target, home) as (path, job):
        found = _manifests(path, job)
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo(f"no committed checkpoint in {path}", err=True)
        return
    table = columns("step", "generation", "mesh", "files", "size", "committed", "directory")
    for manifest in found:
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


@app.command()
def save(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A running job.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the running job's next state to storage now, whatever its cadence.

    Example: `holdfast checkpoint save stdlib-bytes`
    """
    from ..client import ask
    from ..options import find_job
    from ..output import print_json

    reply = ask(find_job(job, home), "checkpoint")
    if as_json:
        print_json({"job": job, "verb": "checkpoint", "detail": reply.detail, **reply.body})
    else:
        typer.echo(f"job {job}: {reply.detail}")


@app.command()
def verify(
    target: TargetArgument,
    step: StepOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and compare its checksums; exit code 1 if it is damaged."""
    from ..output import plural, size

    with _storage(target, home) as place:
        code, body = _run(["verify", *_arguments(*place, step)], as_json)
    if not as_json:
        where = f"{body['directory']} in {body['path']}"
        for problem in body["problems"]:
            typer.echo(f"damaged: {problem}")
        files, tensors = plural(body["num_files"], "file"), plural(body["num_tensors"], "tensor")
        what = "is good" if body["ok"] else "must not be used"
        typer.echo(f"{where} {what}: {files}, {tensors}, {size(body['num_bytes'])} read")
    raise typer.Exit(code)


@app.command()
def export(
    target: TargetArgument,
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A directory; made if needed.")
    ],
    step: StepOption = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state as well.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a checkpoint as plain safetensors, whatever mesh wrote it.

    Example: `holdfast checkpoint export stdlib-bytes ./model`
    """
    from ..output import size

    more = ["--to", str(destination), *(["--optimizer"] * optimizer)]
    with _storage(target, home) as place:
        code, body = _run(["export", *_arguments(*place, step), *more], as_json)
    if not as_json:
        for file in body["files"]:
            typer.echo(file)
        typer.echo(f"step {body['step']}: {size(body['num_bytes'])} of safetensors", err=True)
    raise typer.Exit(code)


def _arguments(path: str, job: str, step: int | None) -> list[str]:
    """The storage tier and the step, as arguments. Raises UserError for an unknown step."""
    from ...protocol.errors import Problem, UserError

    steps = [manifest.step for manifest in _manifests(path, job)]
    if not steps:
        problem = Problem(job or path, f"no committed checkpoint in {path}", "at least one")
        raise UserError(str(problem))
    if step is None:
        return [path]
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(str(Problem("--step", str(step), f"one of {known}")))
    return [path, "--step", str(step)]


@contextmanager
def _storage(target: str, home: Path | None) -> Iterator[tuple[str, str]]:
    """(directory or URL of the storage tier, job name or empty). A job's store is opened with its
    spec.env, any other with this process' environment."""
    from ...protocol.errors import Problem, UserError
    from ...runtime.home import Home
    from ...runtime.surroundings import job_environment, storage_place

    if "://" in target or "/" in target or target in (".", ".."):
        if "://" not in target and not Path(target).expanduser().is_dir():
            raise UserError(str(Problem("JOB_OR_PATH", target, "a directory, a URL or a job")))
        yield storage_place(target, Path.cwd()), ""
        return
    directory = Home(home).find(target)
    job = directory.job()
    with job_environment(job):
        yield directory.checkpoint_path(job), target


def _manifests(path: str, job: str) -> list[Manifest]:
    from ...runtime.storage import Storage

    return Storage(path, job).manifests()


def _run(arguments: list[str], as_json: bool) -> tuple[int, dict[str, Any]]:
    """Its exit code and the JSON it printed. Raises HoldfastError or UserError as it reports."""
    import json

    from ...protocol.errors import HoldfastError, UserError

    done = subprocess.run(
        [sys.executable, "-m", "workers.checkpoint", *arguments],
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
