"""`holdfast run`: start a job and watch it, or take over one whose controller died.

Owns: this verb. Must not: hold the controller's loop; runtime/run.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import HomeOption

if TYPE_CHECKING:
    from ...protocol.spec import TrainingJob
    from ...runtime.home import Home


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

    Exit code 0 when the job succeeded, 1 when it failed or was cancelled, 2 for a mistake in FILE,
    130 when Ctrl-C cancelled it. When this process is killed, or its machine's terminal is lost,
    the agents go on training; `--attach` takes them over.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run --attach stdlib-bytes`
    """
    raise typer.Exit(_run(file, attach, home, as_json))


def _run(file: Path | None, attach: str | None, home: Path | None, as_json: bool) -> int:
    """The exit code."""
    from ...runtime.clock import Clock
    from ...runtime.home import Home
    from ...runtime.record import expire
    from ...runtime.service import run_job
    from ..display import SilentDisplay, make_display
    from ..output import print_json, stderr, stdout
    from ..report import print_report

    place = Home(home)
    job, spec_directory = _job(file, attach, place)
    for name in expire(place, Clock().now_ns()) if attach is None else ():
        stderr().print(f"job {name}: deleted, its ttlSecondsAfterFinished is over")
    console = stderr() if as_json else stdout()
    notes: list[str] = []
    display = SilentDisplay(console) if as_json else make_display(console)

    def note(text: str) -> None:
        notes.append(text)
        display.note(text)

    with display:
        view = run_job(
            job,
            place,
            spec_directory,
            on_view=display.show,
            attach=attach is not None,
            on_note=note,
        )
    if as_json:
        print_json(view)
    else:
        print_report(console, view)
    if any(text.startswith("Ctrl-C") for text in notes):
        return 130
    return 0 if view.state == "succeeded" else 1


def _job(file: Path | None, attach: str | None, place: Home) -> tuple[TrainingJob, Path]:
    """What to run, and the directory that its paths are relative to. Raises UserError."""
    from ...protocol.errors import UserError
    from ..preflight import load_checked

    if file is not None and attach is not None:
        raise UserError("FILE: got one beside --attach JOB; expected one of them")
    if attach is not None:
        directory = place.find(attach)
        return directory.job(), Path(directory.spec_directory)
    if file is None:
        raise UserError("FILE: got nothing; expected a TrainingJob in YAML, or --attach JOB")
    job = load_checked(file)
    _check_size(job)
    return job, file.absolute().parent


def _check_size(job: TrainingJob) -> None:
    """Raises SpecError for more nodes than this machine can bear."""
    from ...backends.local import node_limit
    from ...protocol.errors import Problem, SpecError

    nodes, limit = job.spec.nodes, node_limit(job)
    wanted = nodes.max + nodes.spares
    if wanted > limit:
        workers = job.spec.workers_per_node
        expected = f"at most {limit} nodes of {workers} workers, spares included, on this machine"
        raise SpecError([Problem("spec.nodes.max", f"{wanted} with spares", expected)])
