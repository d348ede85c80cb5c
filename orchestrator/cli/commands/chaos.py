"""`holdfast chaos`: rehearse failures on a running job.

Owns: these verbs. Must not: kill anything itself; the controller notes the rehearsal, then the
node's agent does it, so that it hits exactly what a real failure would hit.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import JobArgument, JsonOption, Target, with_target

app = typer.Typer(
    no_args_is_help=True,
    help="""Rehearse failures on a running job.

The report marks what was rehearsed. Without --rank or --node the victim is the last one, which is
as good as any: there is no special rank or node.""",
)

RankOption = Annotated[
    int | None, typer.Option("--rank", min=0, help="The worker.", show_default="the last one")
]
NodeOption = Annotated[
    str | None, typer.Option("--node", help="The node.", show_default="the last one")
]
HoldOption = Annotated[
    float | None,
    typer.Option(
        "--hold", min=0, metavar="SECONDS", help="No replacement for this long: the job shrinks."
    ),
]


@app.command("kill-worker")
@with_target
def kill_worker(
    job: JobArgument,
    rank: RankOption = None,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """SIGKILL one worker process.

    Example: `holdfast chaos kill-worker stdlib-bytes --rank 1`
    """
    _inject("kill-worker", place, job, as_json, rank=rank)


@app.command("hang-worker")
@with_target
def hang_worker(
    job: JobArgument,
    rank: RankOption = None,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """SIGSTOP one worker process: it lives, but makes no progress.

    Example: `holdfast chaos hang-worker stdlib-bytes`
    """
    _inject("hang-worker", place, job, as_json, rank=rank)


@app.command("kill-node")
@with_target
def kill_node(
    job: JobArgument,
    node: NodeOption = None,
    hold: HoldOption = None,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """SIGKILL a node's agent; its workers and the checkpoints in its memory go with it.

    Example: `holdfast chaos kill-node stdlib-bytes --node node-0`
    """
    _inject("kill-node", place, job, as_json, node=node, hold_s=hold)


def _inject(
    kind: str,
    place: Target,
    job: str,
    as_json: bool,
    **arguments: int | float | str | None,
) -> None:
    from ..output import print_json

    given = {name: value for name, value in arguments.items() if value is not None}
    answer = place.find(job).request("chaos", kind=kind, **given)
    if as_json:
        print_json(
            {"job": job, "verb": "chaos", "kind": kind, "detail": answer.detail, **answer.body}
        )
    else:
        typer.echo(f"job {job}: {answer.detail or kind}")
