"""`holdfast resize | suspend | resume | cancel | delete`: change a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import UserError

from ..options import JobArgument, JsonOption, Target, with_target
from ..output import print_json


def register(app: typer.Typer, panel: str) -> None:
    for command in (resize, suspend, resume, cancel, delete):
        app.command(rich_help_panel=panel)(with_target(command))


def _request(
    target: Target, job: str, as_json: bool, verb: str, done: str, **arguments: Any
) -> None:
    answer = target.find(job).request(verb, **arguments)
    if as_json:
        print_json({"job": job, "verb": verb, "detail": answer.detail, **answer.body})
    else:
        typer.echo(f"job {job}: {answer.detail or done}")


def resize(
    job: JobArgument,
    nodes: Annotated[
        int, typer.Argument(metavar="N", min=1, max=limits.MAX_NODES, help="Number of nodes.")
    ],
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Train on N nodes from now on. N may exceed spec.nodes.max.

    The job stops briefly, and continues after its last step with as many whole replicas as N nodes
    can hold. A recipe keeps its global batch size.

    Example: `holdfast resize my-job 1`
    """
    _request(target, job, as_json, "resize", f"resize to {nodes} requested", nodes=nodes)


def suspend(job: JobArgument, as_json: JsonOption = False, *, target: Target) -> None:
    """Write a checkpoint, stop the workers and release the nodes until `holdfast resume`."""
    _request(target, job, as_json, "suspend", "suspend requested")


def resume(
    job: JobArgument,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over", help="Begin at step 0; only for a job that is held for its checkpoints."
        ),
    ] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Continue a suspended job.

    Its controller must run; otherwise start it with `holdfast attach JOB`. If no checkpoint
    can be used, repair one first with `holdfast checkpoint repair JOB`, or begin at step 0 with
    --start-over; the same holds if the script ignored its own checkpoint.
    """
    more = {"start_over": True} if start_over else {}
    _request(target, job, as_json, "resume", "resume requested", **more)


def cancel(job: JobArgument, as_json: JsonOption = False, *, target: Target) -> None:
    """End a job permanently. Its record and its checkpoints stay."""
    _request(target, job, as_json, "cancel", "cancel requested")


def delete(
    job: JobArgument,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep-checkpoints",
            metavar="DIRECTORY",
            help="Move the checkpoints to this directory first.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    *,
    target: Target,
) -> None:
    """Delete the record of a finished job: journal, logs, and checkpoints in its directory.

    Checkpoints at a spec.checkpoint.path outside of that directory stay. To continue from them, run
    a job of the same name with that path.

    Example: `holdfast delete my-job --keep-checkpoints my-checkpoints`
    """
    remote = target.find(job)
    what = remote.describe_deletion(keep)
    if not yes and not sys.stdin.isatty():
        raise UserError("stdin is not a terminal: pass --yes")
    if not yes:
        typer.confirm(f"Delete {what}?", abort=True)
    remarks = remote.delete(keep)
    typer.echo(f"job {job}: deleted")
    for remark in remarks:
        typer.echo(remark)
