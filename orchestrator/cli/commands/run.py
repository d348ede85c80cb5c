"""`holdfast run`: start a job and watch it, or take over one whose controller died.

Owns: this verb. Must not: hold the controller's loop; runtime/run.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Target, with_target


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
            help="Take over a job whose controller died; in a cluster, watch it again. No FILE.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Show nothing while it runs; print the report as JSON.")
    ] = False,
    *,
    place: Target,
) -> None:
    """Train on this machine and watch, until the job ends. The report comes last.

    Exit code 0 when the job succeeded, 1 when it failed or was cancelled, 2 for a mistake in FILE,
    130 when Ctrl-C cancelled it. When this process is killed, or its machine's terminal is lost,
    the agents go on training for 15 minutes; `--attach` takes them over.

    With --kubernetes the job is created in a cluster and watched. There it needs nobody who
    watches: Ctrl-C (130 as well) leaves it as it is, and `--attach` shows it again.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run --attach stdlib-bytes`
    """
    raise typer.Exit(_run(file, attach, place, as_json))


def _run(file: Path | None, attach: str | None, place: Target, as_json: bool) -> int:
    """The exit code."""
    from holdfast.orchestrator.errors import UserError

    from ..display import SilentDisplay, make_display
    from ..output import print_json, stderr, stdout
    from ..report import print_report

    if file is not None and attach is not None:
        raise UserError("FILE: got one beside --attach JOB; expected one of them")
    if file is None and attach is None:
        raise UserError("FILE: got nothing; expected a TrainingJob in YAML, or --attach JOB")
    console = stderr() if as_json else stdout()
    ended = place.run(file, attach, SilentDisplay(console) if as_json else make_display(console))
    if ended.view is not None:
        if as_json:
            print_json(ended.view)
        else:
            reads = place.reads(ended.view.checkpoint_path)
            print_report(console, ended.view, command=place.command, reads=reads)
    return ended.exit_code
