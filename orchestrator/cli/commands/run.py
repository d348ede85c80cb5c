"""`holdfast run`: start a job and watch it, or take over one whose controller died."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.orchestrator.errors import UserError

from ..options import Target, with_target
from ..output import print_json, stderr, stdout


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(with_target(run))


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A TrainingJob in YAML.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach",
            metavar="JOB",
            help="Take over a job whose controller died; in a cluster, watch it again.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print nothing while the job runs, then the report as JSON."),
    ] = False,
    *,
    target: Target,
) -> None:
    """Train on this machine, show the progress until the job ends, then print the report.

    Exit code 0 when the job succeeded, 1 when it failed or was cancelled, 2 for invalid usage or an
    invalid job spec, 130 when Ctrl-C cancelled the job. When this process is killed or loses its
    terminal, the agents keep training for spec.recovery.controllerAbsenceSeconds (15 minutes);
    `--attach` takes the job over.

    With --kubernetes or --ray the job is created in a cluster and watched. It runs there without
    this process: Ctrl-C (also 130) leaves it running, and `--attach` watches it again.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run --attach stdlib-bytes`
    """
    raise typer.Exit(_run(file, attach, target, as_json))


def _run(file: Path | None, attach: str | None, target: Target, as_json: bool) -> int:
    """The exit code."""
    from ..display import SilentDisplay, make_display
    from ..report import print_report

    if file is not None and attach is not None:
        raise UserError("FILE: got FILE and --attach JOB; expected only one of them")
    if file is None and attach is None:
        raise UserError("FILE: got nothing; expected a TrainingJob in YAML, or --attach JOB")
    console = stderr() if as_json else stdout()
    done = target.run(file, attach, SilentDisplay(console) if as_json else make_display(console))
    if done.view is not None:
        if as_json:
            print_json(done.view)
        else:
            can_read = target.can_read(done.view.checkpoint_path)
            print_report(console, done.view, command=target.command, can_read=can_read)
    return done.exit_code
