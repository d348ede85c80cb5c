"""`holdfast run`: start a job and watch it, or take over one whose controller died.

Owns: this verb. Must not: hold the controller's loop; runtime/run.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import HomeOption


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(run)


def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A TrainingJob in YAML.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach", metavar="JOB", help="Take over a job whose controller died; no FILE."
        ),
    ] = None,
    home: HomeOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Show nothing while it runs; print the report as JSON.")
    ] = False,
) -> None:
    """Train on this machine and watch, until the job ends. The report comes last.

    Exit code 0 when the job succeeded, 1 when it failed or was cancelled, 2 for a mistake in FILE.
    Ctrl-C leaves the agents training; `--attach` comes back to them, `holdfast cancel` ends them.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run --attach stdlib-bytes`
    """
    raise typer.Exit(_run(file, attach, home, as_json))


def _run(file: Path | None, attach: str | None, home: Path | None, as_json: bool) -> int:
    raise NotImplementedError
