"""`holdfast run`: start a job and watch it, or take over one whose controller died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from ..options import Target, with_target
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
AgainOption = Annotated[
    str | None,
    typer.Option(
        "--again",
        metavar="JOB",
        help="Restart the workers of a running job with its edited code, on the same nodes, "
        "from its last checkpoint; on this machine, also run a job that has ended again.",
    ),
]
AGAIN_S = 120.0
"""A first step of the new code is waited for so long. The job does not depend on it."""
AGAIN_LOOK_S = 0.1


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(with_target(run))


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
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach",
            metavar="JOB",
            help="Watch a job that runs; on this machine, take over one whose controller died.",
        ),
    ] = None,
    lines: Annotated[
        bool | None,
        typer.Option(
            "--logs/--no-logs",
            help="Show what rank 0 prints.",
            show_default="of a script on this machine and on Kubernetes",
        ),
    ] = None,
    again: AgainOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print nothing while the job runs, then the report as JSON."),
    ] = False,
    *,
    target: Target,
) -> None:
    """Train on this machine, show the progress until the job ends, then print the report.

    Exit code: 0 if the job succeeds, 1 if it fails or is cancelled, 2 for invalid usage or an
    invalid job spec, 130 after Ctrl-C. If this process dies, the agents keep training for
    spec.recovery.controllerAbsenceSeconds (15 minutes), and `--attach` takes the job over.

    With --kubernetes or --ray the job runs in a cluster without this process: Ctrl-C leaves it
    running, and `--attach` watches it again.

    --again returns after the first step of the new code. In a cluster it uploads the directory of
    FILE, by default the current one. A job of this machine that has ended runs again from its
    newest checkpoint.

    A script needs no spec: run prints the spec that it makes of the options; --save writes it.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run --attach stdlib-bytes`,
    `holdfast run --again my-job`,
    `holdfast run train.py --nodes 2 --workers 2 -- --lr 3e-4`,
    `holdfast run -- torchrun --nproc_per_node 2 train.py`
    """
    wanted = asked(
        None if again is not None else file, words, save,
        nodes=nodes, workers=workers, gpus=gpus, name=name, env=env, python=python,
        resume_args=resume_args,
    )  # fmt: skip
    if again is not None:
        raise typer.Exit(_run_again(target, again, file, attach, as_json, lines))
    if wanted is None or attach is not None:
        raise typer.Exit(_run(file, attach, target, as_json, lines))
    raise typer.Exit(_run_script(wanted, save, target, as_json, lines))


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
        return _run(made, None, target, as_json, lines, Path.cwd() if save is None else None)


def _run(
    file: Path | None,
    attach: str | None,
    target: Target,
    as_json: bool,
    lines: bool | None,
    directory: Path | None = None,
) -> int:
    """The exit code. `directory`: of the spec, where it is not that of the file."""
    if file is not None and attach is not None:
        raise UserError("FILE: got FILE and --attach JOB; expected only one of them")
    if file is None and attach is None:
        raise UserError(
            "FILE: got nothing; expected a TrainingJob in YAML, a script, or --attach JOB"
        )
    return _shown(
        target, as_json, lines, lambda display: target.run(file, attach, display, directory)
    )


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


def _run_again(
    target: Target,
    name: str,
    file: Path | None,
    attach: str | None,
    as_json: bool,
    lines: bool | None,
) -> int:
    """Request a generation with new code and wait for its first step; of a job that has ended, run
    it again. The exit code."""
    import time

    from holdfast.orchestrator.core.transitions import TERMINAL

    from ..targets.base import RunsEnded

    if attach is not None:
        raise UserError("--again: got it with --attach; expected only one of them")
    begin = time.monotonic()
    job = target.find(name)
    view = job.view()
    before = view.generation
    if file is None and view.state in TERMINAL and isinstance(target, RunsEnded):
        return _shown(target, as_json, lines, lambda display: target.run_ended(name, display))
    if lines:
        expected = "only one of them for a job that runs"
        raise UserError(str(Problem("--logs", "it with --again", expected)))
    directory = None
    if file is not None:
        directory = file if file.is_dir() else file.absolute().parent
    answer = job.again(directory)
    if not as_json:
        typer.echo(f"job {name}: {answer.detail}")
    view = job.view()
    while not (view.generation > before and view.state == "running"):
        if view.state in TERMINAL:
            raise HoldfastError(f"job {name}: has {view.state} ({view.reason})")
        if time.monotonic() - begin > AGAIN_S or view.state in ("suspended", "suspending"):
            text = f"job {name}: no step of the new code yet: {view.state} ({view.reason})"
            typer.echo(f"{text}; watch it with `{target.command('status', name)}`", err=True)
            return 0
        time.sleep(AGAIN_LOOK_S)
        view = target.find(name).view()
    seconds = time.monotonic() - begin
    if as_json:
        print_json({"job": name, "generation": view.generation, "seconds": round(seconds, 3)})
    else:
        step = f", step {view.step}" if view.step >= 0 else ""
        text = f"generation {view.generation} runs the new code after {seconds:.1f} s{step}"
        typer.echo(f"job {name}: {text}")
    return 0
