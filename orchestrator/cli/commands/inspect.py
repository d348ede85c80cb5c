"""`holdfast status | report | events | logs`: look at a job, alive or not.

Owns: these verbs. Must not: disturb a job; without a controller they read its journal.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import JobArgument, JsonOption, Target, with_target

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]


def register(app: typer.Typer, panel: str) -> None:
    for command in (status, logs, events, report):
        app.command(rich_help_panel=panel)(with_target(command))


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Without it: all jobs.")] = None,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Show a job: step, loss, nodes, workers, checkpoints, incidents. Or list all jobs.

    Example: `holdfast status stdlib-bytes --json`
    """
    from ..output import print_json, stdout
    from ..render import status as render

    if job is None:
        _list(place, as_json)
        return
    found = place.find(job)
    view = found.view()
    if as_json:
        print_json(view)
        return
    console = stdout()
    console.print(render(view), soft_wrap=not console.is_terminal)
    _remark(found.remarks(view))


def _list(place: Target, as_json: bool) -> None:
    from ..output import columns, count, date, print_json, state_text, stdout
    from ..render import FINISHED

    views = place.views()
    if as_json:
        print_json(views)
        return
    if not views:
        typer.echo(place.nothing(), err=True)
        return
    table = columns("job", "state", "steps", "loss", "workers", "incidents", "submitted")
    for view in views:
        lone = not view.controller_alive and view.state not in FINISHED
        steps = str(view.step + 1) + (f"/{view.total_steps}" if view.total_steps else "")
        table.add_row(
            view.name,
            state_text("unattended" if lone else view.state),
            steps,
            f"{view.loss:.4f}" if view.loss is not None else "",
            count(view.world_size),
            str(max(view.num_incidents, len(view.incidents))),
            date(view.submitted_ns) if view.submitted_ns else "",
        )
    stdout().print(table)


def report(
    job: JobArgument,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="All stacks taken, not only the culprit's.")
    ] = False,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Say how a job went: goodput, where the time went, each incident with cause and cost.

    Example: `holdfast report stdlib-bytes`
    """
    from ..output import print_json, stdout
    from ..report import print_report

    found = place.find(job)
    view = found.view()
    if as_json:
        print_json(view)
        return
    reads = place.reads(view.checkpoint_path)
    print_report(stdout(), view, stacks=stacks, command=place.command, reads=reads)
    _remark(found.remarks(view))


def _remark(remarks: list[str]) -> None:
    from ..output import stderr

    for remark in remarks:
        stderr().print(remark, style="yellow", soft_wrap=True)


def events(
    job: JobArgument,
    follow: FollowOption = False,
    as_json: JsonOption = False,
    *,
    place: Target,
) -> None:
    """Print every fact that the controller was told, and what it decided on it, with the reason.

    Decisions are not stored: they follow from the facts, by the same code that took them. Of a job
    that ran for days the oldest facts are gone; a first line says how many. --json prints one
    document per line.
    """
    place.find(job).print_events(follow=follow, as_json=as_json)


def logs(
    job: JobArgument,
    follow: FollowOption = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this worker.")] = None,
    generation: Annotated[
        int | None,
        typer.Option("--generation", "-g", help="Workers of this one.", show_default="newest"),
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="The agent of this node instead of workers.")
    ] = None,
    *,
    place: Target,
) -> None:
    """Print what the workers wrote (stdout and stderr), each line with its rank.

    Examples: `holdfast logs my-job -f --rank 0`, `holdfast logs my-job --node node-1`
    """
    from ..targets.base import LogSelector

    place.find(job).print_logs(LogSelector(rank, generation, node), follow=follow)
