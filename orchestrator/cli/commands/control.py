"""`holdfast resize | suspend | resume | cancel | delete`: change a job.

Owns: these verbs. Must not: change anything itself; the controller does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import HomeOption, JobArgument, JsonOption, find_job


def register(app: typer.Typer, panel: str) -> None:
    for command in (resize, suspend, resume, cancel, delete):
        app.command(rich_help_panel=panel)(command)


def _request(job: str, home: Any, as_json: bool, verb: str, done: str, **arguments: Any) -> None:
    from ..client import ask
    from ..output import print_json

    reply = ask(find_job(job, home), verb, **arguments)
    if as_json:
        print_json({"job": job, "verb": verb, "detail": reply.detail, **reply.body})
    else:
        typer.echo(f"job {job}: {reply.detail or done}")


def resize(
    job: JobArgument,
    nodes: Annotated[int, typer.Argument(metavar="N", min=1, help="Nodes to train on.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train on N nodes from now on, also beyond spec.nodes.max.

    The job stops for a moment, gets whole replica groups on N nodes, and goes on after its last
    step with the same global batch.

    Example: `holdfast resize my-job 1`
    """
    _request(job, home, as_json, "resize", f"resize to {nodes} requested", nodes=nodes)


def suspend(job: JobArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Write a checkpoint, stop the workers and hold the job until `holdfast resume`."""
    _request(job, home, as_json, "suspend", "suspend requested")


def resume(job: JobArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Go on with a suspended job.

    Its controller must be there; if it is gone, `holdfast run --attach JOB` brings it back first.
    """
    _request(job, home, as_json, "resume", "resume requested")


def cancel(job: JobArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """End a job for good. Its record and its checkpoints stay."""
    _request(job, home, as_json, "cancel", "cancel requested")


def delete(
    job: JobArgument,
    keep: Annotated[
        Path | None,
        typer.Option("--keep-checkpoints", metavar="DIRECTORY", help="Move them there first."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    home: HomeOption = None,
) -> None:
    """Delete the record of a finished job: journal, logs, and checkpoints in its directory.

    Checkpoints at a spec.checkpoint.path outside of the job's directory stay where they are. To go
    on from them, run a job of the same name with that path.

    Example: `holdfast delete my-job --keep-checkpoints my-checkpoints`
    """
    from ...protocol.errors import UserError
    from ..options import read_view
    from ..render import FINISHED

    directory = find_job(job, home)
    state = read_view(directory).state
    if state not in FINISHED:
        raise UserError(
            f"job {job}: got a job that is {state}; expected one that is "
            f"{', '.join(FINISHED[:-1])} or {FINISHED[-1]}; end it with `holdfast cancel {job}`"
        )
    if not yes:
        what = "logs" if keep is not None else "logs and checkpoints"
        typer.confirm(f"Delete {directory.path} with its {what}?", abort=True)
    kept = keep.absolute() if keep is not None else None
    directory.remove(kept)
    typer.echo(f"job {job}: deleted")
    if kept is not None:
        typer.echo(f"to go on from its checkpoints: spec.checkpoint.path: {kept}")
