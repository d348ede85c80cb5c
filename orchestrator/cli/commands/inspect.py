"""`holdfast status | logs | debug events`: look at a job, running or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.orchestrator.core.transitions import TERMINAL

from ...errors import UserError
from ...parts import part
from ..options import JobArgument, JsonOption, Target, with_target
from ..output import columns, count, date, print_json, state_text, stderr, stdout

if TYPE_CHECKING:
    from ...runtime.observe.view import JobView
    from ..targets.remote_job import LogSelector

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")]


def register(app: typer.Typer, panel: str) -> None:
    for command in (status, logs):
        app.command(rich_help_panel=panel)(with_target(command))


def register_events(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(with_target(events))


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Without JOB: all jobs.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it until it ends; Ctrl-C leaves it running.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Goodput, where the time went, each incident with its cost."),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="The report with all stacks, not only the culprit's.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write the report as one HTML file."),
    ] = None,
    *,
    target: Target,
) -> None:
    """Show a job: step, loss, nodes, workers, checkpoints, incidents. Or list all jobs.

    Examples: `holdfast status stdlib-bytes --watch`, `holdfast status stdlib-bytes --report`
    """
    from .. import render
    from .. import report as reports

    for option, wanted in (("--watch", watch), ("--report", report or stacks), ("--html", html)):
        if wanted and (job is None or (watch and as_json)):
            why = "needs a JOB" if job is None else "prints text: leave --json out"
            raise UserError(f"{option} {why}")
    if job is None:
        _list(target, as_json)
        return
    if watch:
        from ..display import make_display, watch_job

        with make_display(stdout(), wants_lines=False) as display:
            watch_job(lambda: target.find(job).view(), display)
    remote = target.find(job)
    view = remote.view()
    if html is not None:
        if (write_report := part("ui report")) is None:
            raise UserError.of("--html", html, "an installation of Holdfast that has it")
        write_report(view, html, target.command("status", view.name, "--report"))
    if as_json:
        print_json(view)
        return
    console = stdout()
    if html is not None:
        console.print(f"{view.name}: the report is in {html}", soft_wrap=True)
    elif report or stacks:
        can_read = target.can_read(view.checkpoint_path)
        console.print(
            reports.report(view, stacks=stacks, command=target.command, can_read=can_read)
        )
    else:
        console.print(render.status(view))
    for remark in remote.remarks(view):
        stderr().print(remark, style="yellow", soft_wrap=True)


def _list(target: Target, as_json: bool) -> None:
    views = target.views()
    if as_json:
        print_json(views)
        return
    if not views:
        typer.echo(target.empty_message(), err=True)
        return
    names = ("job", "state", "steps", "loss", "workers", "incidents", "submitted")
    table = columns(*names, leaves_out=names[:2:-1])
    for view in views:
        unattended = not view.controller_alive and view.state not in TERMINAL
        steps = str(view.step + 1) + (f"/{view.total_steps}" if view.total_steps else "")
        if view.step < 0 and not view.total_steps:
            steps = "-"  # a script that reports none
        table.add_row(
            view.name, state_text("unattended" if unattended else view.state), steps,
            f"{view.loss:.4f}" if view.loss is not None else "", count(view.world_size),
            str(max(view.num_incidents, len(view.incidents))),
            date(view.submitted_ns) if view.submitted_ns else "",
        )  # fmt: skip
    stdout().print(table)


def events(
    job: JobArgument, follow: FollowOption = False, as_json: JsonOption = False, *, target: Target
) -> None:
    """Print every event that the controller received, and each decision with its reason.

    If the oldest events of a long job are no longer kept, the first line says how many. --json
    prints one document per line.
    """
    target.find(job).print_events(follow=follow, as_json=as_json)


def logs(
    job: JobArgument,
    follow: FollowOption = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation",
            "-g",
            help="Generation of the workers.",
            show_default="all, one after the other; with --follow the newest",
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Print the log of this node's agent instead.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only the worker that caused the last failure.")
    ] = False,
    *,
    target: Target,
) -> None:
    """Print what the workers printed, each line with its rank, from the oldest generation on.

    Progress bars are reduced to their last state.

    Examples: `holdfast logs my-job -f --rank 0`, `holdfast logs my-job --failed`
    """
    from ..log_files import LogMissing
    from ..targets.remote_job import LogSelector

    remote, wanted = target.find(job), LogSelector(rank, generation, node)
    if failed:
        if follow or wanted != LogSelector():
            got, expected = "--failed with another option", "it alone: it chooses the log"
            raise UserError.of("--failed", got, expected)
        wanted = _failure_selector(remote.view())
    try:
        remote.print_logs(wanted, follow=follow)
    except LogMissing:
        if not failed:
            raise
        worker = "workers" if wanted.rank is None else f"rank {wanted.rank}"
        got = f"no line of {worker} in generation {wanted.generation}"
        fix = f"it printed none, or its log is gone; see `{target.command('logs', remote.name)}`"
        raise UserError.of("--failed", got, "one", fix) from None


def _failure_selector(view: JobView) -> LogSelector:
    """The log of the newest failure's culprit; of all its workers if no rank is one. Raises
    UserError if the job has not failed."""
    from ..render import incident_title
    from ..targets.remote_job import LogSelector

    failures = ("user", "infrastructure", "hang")
    newest = next((i for i in reversed(view.incidents) if i.failure_class in failures), None)
    if newest is None:
        raise UserError.of("--failed", view.name, "a job with a failure")
    generation, title = newest.generation_before, incident_title(newest)
    stderr().print(f"generation {generation}: {title}", style="yellow", soft_wrap=True)
    return LogSelector(newest.culprit_rank, generation)
