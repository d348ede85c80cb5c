"""`holdfast debug kill-worker | hang-worker | kill-node`: inject faults into a running job.

The controller records the fault in the journal, then the node's agent causes it, so that it takes
the same path as a real failure.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..options import JobArgument, JsonOption, Target, with_target
from ..output import print_json

POLL_S = 0.3


def register(app: typer.Typer, panel: str) -> None:
    for command in (kill_worker, hang_worker, kill_node):
        app.command(rich_help_panel=panel)(with_target(command))


RankOption = Annotated[
    int | None,
    typer.Option("--rank", min=0, help="Rank of the worker.", show_default="the last one"),
]
NodeOption = Annotated[
    str | None, typer.Option("--node", help="Name of the node.", show_default="the last one")
]
HoldOption = Annotated[
    float | None,
    typer.Option(
        "--hold", min=0, metavar="SECONDS",
        help="Request no replacement for this long, so that the job shrinks.",
    ),
]  # fmt: skip


def kill_worker(
    job: JobArgument, rank: RankOption = None, as_json: JsonOption = False, *, target: Target
) -> None:
    """Kill one worker process with SIGKILL. The report marks the incident as injected.

    Example: `holdfast debug kill-worker stdlib-bytes --rank 1`
    """
    _inject("kill-worker", target, job, as_json, rank=rank)


def hang_worker(
    job: JobArgument, rank: RankOption = None, as_json: JsonOption = False, *, target: Target
) -> None:
    """Stop one worker process with SIGSTOP, so that it hangs.

    Example: `holdfast debug hang-worker stdlib-bytes`
    """
    _inject("hang-worker", target, job, as_json, rank=rank)


def kill_node(
    job: JobArgument,
    node: NodeOption = None,
    hold: HoldOption = None,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Kill the agent of a node with SIGKILL: its workers and in-memory checkpoints are lost.

    Example: `holdfast debug kill-node stdlib-bytes --node node-0`
    """
    _inject("kill-node", target, job, as_json, node=node, hold_s=hold)


def _inject(
    kind: str, target: Target, job: str, as_json: bool, **arguments: int | float | str | None
) -> None:
    arguments_given = {name: value for name, value in arguments.items() if value is not None}
    running, waits = target.find(job), False
    while (view := running.view()).state in ("pending", "starting") and view.controller_alive:
        if not waits:
            typer.echo(f"job {job}: is {view.state}; {kind} waits until it trains", err=True)
        waits = True
        time.sleep(POLL_S)
    answer = running.request("chaos", kind=kind, **arguments_given)
    if as_json:
        print_json({"job": job, "kind": kind, "detail": answer.detail, **answer.body})
    else:
        typer.echo(f"job {job}: {answer.detail or kind}")
