"""`holdfast resize | suspend | resume | cancel | delete`: change a job.

Owns: these verbs. Must not: change anything itself; the controller does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.orchestrator import limits

from ..options import JobArgument, JsonOption, Target, with_target


def register(app: typer.Typer, panel: str) -> None:
    for command in (resize, suspend, resume, cancel, delete):
        app.command(rich_help_panel=panel)(with_target(command))


def _request(
    place: Target, job: str, as_json: bool, verb: str, done: str, **arguments: Any
) -> None:
    from ..output import print_json

    answer = place.find(job).request(verb, **arguments)
    if as_json:
        print_json({"job": job, "verb": verb, "detail": answer.detail, **answer.body})
    else:
        typer.echo(f"job {job}: {answer.detail or done}")


def resize(
    job: JobArgument,
    nodes: Annotated[
        int, typer.Argument(metavar="N", min=1, max=limits.MAX_NODES, help="Nodes to train on.")
    ],
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Train on N nodes from now on, also beyond spec.nodes.max.

    The job stops for a moment, gets whole replica groups on N nodes, and goes on after its last
    step with the same global batch.

    Example: `holdfast resize my-job 1`
    """
    _request(place, job, as_json, "resize", f"resize to {nodes} requested", nodes=nodes)


def suspend(job: JobArgument, as_json: JsonOption = False, *, place: Target) -> None:
    """Write a checkpoint, stop the workers and hold the job until `holdfast resume`."""
    _request(place, job, as_json, "suspend", "suspend requested")


def resume(job: JobArgument, as_json: JsonOption = False, *, place: Target) -> None:
    """Go on with a suspended job.

    Its controller must be there; if it is gone, `holdfast run --attach JOB` brings it back first.
    """
    _request(place, job, as_json, "resume", "resume requested")


def cancel(job: JobArgument, as_json: JsonOption = False, *, place: Target) -> None:
    """End a job for good. Its record and its checkpoints stay."""
    _request(place, job, as_json, "cancel", "cancel requested")


def delete(
    job: JobArgument,
    keep: Annotated[
        Path | None,
        typer.Option("--keep-checkpoints", metavar="DIRECTORY", help="Move them there first."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    *,
    place: Target,
) -> None:
    """Delete the record of a finished job: journal, logs, and checkpoints in its directory.

    Checkpoints at a spec.checkpoint.path outside of the job's directory stay where they are. To go
    on from them, run a job of the same name with that path.

    Example: `holdfast delete my-job --keep-checkpoints my-checkpoints`
    """
    found = place.find(job)
    what = found.deleting(keep)
    if not yes:
        typer.confirm(f"Delete {what}?", abort=True)
    remarks = found.delete(keep)
    typer.echo(f"job {job}: deleted")
    for remark in remarks:
        typer.echo(remark)
