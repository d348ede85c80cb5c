"""`holdfast run | attach | again`: start a job and watch it, watch one that runs, edit its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from ..options import JobArgument, Target, with_target
from ..output import ignoring_closed_output, print_json, stderr, stdout
from ..script_job import (
    EnvOption,
    GpusOption,
    NameOption,
    NodesOption,
    PythonOption,
    ResumeOption,
    SaveOption,
    ScriptRun,
    WordsArgument,
    WorkersOption,
    asked,
    spec_file,
)

if TYPE_CHECKING:
    from ..display import Display
    from ..targets.base import RunResult

RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="A TrainingJob in YAML, or a training script in Python. The line of a launcher "
        "comes after --.",
    ),
]
LinesOption = Annotated[
    bool | None,
    typer.Option(
        "--logs/--no-logs",
        help="Show what rank 0 prints.",
        show_default="of a script on this machine and on Kubernetes",
    ),
]
ReportOption = Annotated[
    bool,
    typer.Option("--json", help="Print nothing while the job runs, then the report as JSON."),
]
AGAIN_S = 120.0
"""A first step of the new code is waited for so long. The job does not depend on it."""
AGAIN_LOOK_S = 0.1


def register(app: typer.Typer, panel: str) -> None:
    for command in (run, attach, again):
        app.command(rich_help_panel=panel)(with_target(command))


def run(
    file: RunArgument = None,
    words: WordsArgument = None,
    nodes: NodesOption = None,
    workers: WorkersOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    resume_args: ResumeOption = None,
    save: SaveOption = None,
    lines: LinesOption = None,
    as_json: ReportOption = False,
    *,
    target: Target,
) -> None:
    """Train on this machine, show the progress until the job ends, then print the report.

    Exit code: 0 if the job succeeds, 1 if it fails or is cancelled, 2 for invalid usage or an
    invalid job spec, 130 after Ctrl-C. If this process dies, the agents keep training for
    spec.recovery.controllerAbsenceSeconds (15 minutes), and `holdfast attach` takes the job over.

    With --kubernetes or --ray the job runs in a cluster without this process: Ctrl-C leaves it
    running, and `holdfast attach` watches it again.

    A script needs no spec: run prints the spec that it makes of the options; --save writes it.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run train.py --nodes 2 --workers 2 -- --lr 3e-4`,
    `holdfast run -- torchrun --nproc_per_node 2 train.py`
    """
    wanted = asked(
        file, words, save,
        nodes=nodes, workers=workers, gpus=gpus, name=name, env=env, python=python,
        resume_args=resume_args,
    )  # fmt: skip
    if wanted is not None:
        raise typer.Exit(_run_script(wanted, save, target, as_json, lines))
    if file is None:
        raise UserError("FILE: got nothing; expected a TrainingJob in YAML, or a script")
    raise typer.Exit(_shown(target, as_json, lines, lambda shown: target.run(file, shown)))


def attach(
    job: JobArgument,
    lines: LinesOption = None,
    as_json: ReportOption = False,
    *,
    target: Target,
) -> None:
    """Watch a job until it ends, then print the report, with the exit code of `holdfast run`.

    On this machine attach takes a job over whose controller died. Ctrl-C leaves a job running that
    another process controls.

    Example: `holdfast attach my-job`
    """
    raise typer.Exit(_shown(target, as_json, lines, lambda display: target.attach(job, display)))


def _run_script(
    wanted: ScriptRun, save: Path | None, target: Target, as_json: bool, lines: bool | None
) -> int:
    """Make the spec, and run it. The exit code."""
    from ..targets.base import RunsEnded, Uploads

    def show(text: str) -> None:
        with ignoring_closed_output():
            (stderr() if as_json else stdout()).print(text, markup=False, soft_wrap=True)

    uploads = isinstance(target, Uploads)
    wanted = replace(wanted, is_local=isinstance(target, RunsEnded))
    with spec_file(wanted, save, target.free_name, show, uploads=uploads) as made:
        directory = Path.cwd() if save is None else None
        return _shown(target, as_json, lines, lambda shown: target.run(made, shown, directory))


def _shown(
    target: Target, as_json: bool, lines: bool | None, run_job: Callable[[Display], RunResult]
) -> int:
    """Show a job until it ends, then print the report. The exit code."""
    from ..display import SilentDisplay, make_display
    from ..report import print_report

    if lines and as_json:
        raise UserError(str(Problem("--logs", "--logs and --json", "only one of them")))
    console = stderr() if as_json else stdout()
    display = SilentDisplay(console) if as_json else make_display(console, lines)
    done = run_job(display)
    if done.view is not None:
        with ignoring_closed_output():
            if as_json:
                print_json(done.view)
            else:
                can_read = target.can_read(done.view.checkpoint_path)
                print_report(console, done.view, command=target.command, can_read=can_read)
    return done.exit_code


def again(
    job: JobArgument,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Its directory is uploaded.", show_default="the current directory"
        ),
    ] = None,
    lines: LinesOption = None,
    as_json: ReportOption = False,
    *,
    target: Target,
) -> None:
    """Restart the workers of a job with its edited code, on the same nodes.

    The job continues from its last checkpoint, and again returns after the first step of the new
    code; exit code 1 if the job ends before that. A job of this machine that has ended runs again,
    as with `holdfast run`.

    Examples: `holdfast again my-job`, `holdfast again my-job train/job.yaml --kubernetes`
    """
    import time

    from holdfast.orchestrator.core.transitions import TERMINAL

    from ..targets.base import RunsEnded

    begin = time.monotonic()
    found = target.find(job)
    view = found.view()
    before = view.generation
    if file is None and view.state in TERMINAL and isinstance(target, RunsEnded):
        runs_ended: RunsEnded = target
        raise typer.Exit(
            _shown(target, as_json, lines, lambda display: runs_ended.run_ended(job, display))
        )
    if lines:
        expected = "it for a job that has ended; `holdfast logs -f` shows those of one that runs"
        raise UserError(str(Problem("--logs", f"it with {job}, which runs", expected)))
    directory = None
    if file is not None:
        directory = file if file.is_dir() else file.absolute().parent
    answer = found.again(directory)
    if not as_json:
        typer.echo(f"job {job}: {answer.detail}")
    view = found.view()
    while not (view.generation > before and view.state == "running"):
        if view.state in TERMINAL:
            raise HoldfastError(f"job {job}: has {view.state} ({view.reason})")
        if time.monotonic() - begin > AGAIN_S or view.state in ("suspended", "suspending"):
            text = f"job {job}: no step of the new code yet: {view.state} ({view.reason})"
            typer.echo(f"{text}; watch it with `{target.command('status', job)}`", err=True)
            return
        time.sleep(AGAIN_LOOK_S)
        view = target.find(job).view()
    seconds = time.monotonic() - begin
    if as_json:
        print_json({"job": job, "generation": view.generation, "seconds": round(seconds, 3)})
    else:
        step = f", step {view.step}" if view.step >= 0 else ""
        text = f"generation {view.generation} runs the new code after {seconds:.1f} s{step}"
        typer.echo(f"job {job}: {text}")
