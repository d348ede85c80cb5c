"""`holdfast status | report | events | logs`: look at a job, alive or not.

Owns: these verbs. Must not: disturb a job; without a controller they read its journal.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import HomeOption, JobArgument, JsonOption, find_job, read_view

FOLLOW_INTERVAL_S = 0.2

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]


def register(app: typer.Typer, panel: str) -> None:
    for command in (status, logs, events, report):
        app.command(rich_help_panel=panel)(command)


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Without it: all jobs.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job: step, loss, nodes, workers, checkpoints, incidents. Or list all jobs.

    Example: `holdfast status stdlib-bytes --json`
    """
    from ..output import print_json, stdout
    from ..render import status as render

    if job is None:
        _list(home, as_json)
        return
    view = read_view(find_job(job, home))
    if as_json:
        print_json(view)
        return
    console = stdout()
    console.print(render(view), soft_wrap=not console.is_terminal)
    _remark_if_unattended(view)


def _list(home: object, as_json: bool) -> None:
    from pathlib import Path

    from ...protocol.errors import HoldfastError
    from ...runtime.home import Home
    from ...runtime.view import JobView
    from ..output import columns, count, date, print_json, state_text, stderr, stdout
    from ..render import FINISHED

    assert home is None or isinstance(home, Path)
    place = Home(home)
    views: list[JobView] = []
    for directory in place.list():
        try:
            views.append(read_view(directory))
        except HoldfastError as error:
            stderr().print(f"{directory.name}: {error}", markup=False, soft_wrap=True)
    if as_json:
        print_json(views)
        return
    if not views:
        typer.echo(f"no jobs in {place.path}; start one with `holdfast run FILE`", err=True)
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
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how a job went: goodput, where the time went, each incident with cause and cost.

    Example: `holdfast report stdlib-bytes`
    """
    from ..output import print_json, stdout
    from ..report import print_report

    view = read_view(find_job(job, home))
    if as_json:
        print_json(view)
        return
    print_report(stdout(), view, stacks=stacks)
    _remark_if_unattended(view)


def _remark_if_unattended(view: object) -> None:
    from ...runtime.view import JobView
    from ..output import stderr
    from ..render import FINISHED

    assert isinstance(view, JobView)
    if view.controller_alive or view.state in FINISHED:
        return
    stderr().print(
        f"No controller is running: this is what the journal says. Training goes on without one; "
        f"take the job over with `holdfast run --attach {view.name}`.",
        style="yellow",
        soft_wrap=True,
    )


def events(
    job: JobArgument,
    follow: FollowOption = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every fact that the controller was told, and what it decided on it, with the reason.

    Decisions are not stored: they follow from the facts, by the same code that took them. Of a job
    that ran for days the oldest facts are gone; a first line says how many. --json prints one
    document per line.
    """
    import time

    from ...runtime.journal import JournalReader, Snapshot
    from ..output import stdout
    from ..sentences import Narrator

    directory = find_job(job, home)
    reader = JournalReader(directory.journal, history=True)
    console, narrator = stdout(), Narrator()
    while True:
        # Asked before reading: what was written up to a controller's end is then seen.
        alive = directory.controller_alive()
        for item in reader.read():
            if isinstance(item, Snapshot):
                narrator.resume(console, item, as_json=as_json)
            else:
                narrator.tell(console, item.now_ns, item.event, as_json=as_json)
        if not follow or not alive:
            return
        time.sleep(FOLLOW_INTERVAL_S)


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
    home: HomeOption = None,
) -> None:
    """Print what the workers wrote (stdout and stderr), each line with its rank.

    Examples: `holdfast logs my-job -f --rank 0`, `holdfast logs my-job --node node-1`
    """
    from ..tail import follow_files, print_files

    directory = find_job(job, home)
    if follow:
        follow_files(directory, rank, generation, node, FOLLOW_INTERVAL_S)
    else:
        print_files(directory, rank, generation, node)
