"""`holdfast run | submit | attach | again`: start a job, watch it, restart it with edited code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.orchestrator.errors import HoldfastError, UserError

from ..options import JobArgument, Target, provided, with_target
from ..output import ignoring_closed_output, plural, print_json, stderr, stdout
from ..script_job import (
    EnvOption,
    GpusOption,
    NameOption,
    NodesOption,
    PythonOption,
    ResumeOption,
    SaveOption,
    WordsArgument,
    WorkersOption,
    asked,
    spec_file,
)

if TYPE_CHECKING:
    from ..display import Display
    from ..targets.base import Launch, RunResult

RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="A TrainingJob in YAML, or a training script in Python. The line of a launcher "
        "comes after --.",
    ),
]
RuntimeEnvOption = Annotated[
    Path | None,
    typer.Option(
        "--runtime-env", metavar="FILE",
        help="With --ray http://HEAD:8265: Ray's runtime_env in YAML: pip, env_vars, ...",
    ),
]  # fmt: skip
LinesOption = Annotated[
    bool | None,
    typer.Option(
        "--logs/--no-logs", help="Show what rank 0 prints.",
        show_default="on for scripts, except on Ray",
    ),
]  # fmt: skip
ReportOption = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
PageOption = Annotated[
    bool, typer.Option("--ui", help="Also open the page of your jobs, see `holdfast ui`.")
]
AGAIN_S = 120.0
"""A first step of the new code is waited for so long. The job does not depend on it."""
AGAIN_LOOK_S = 0.1


RUN = """Train, show the progress until the job ends, then print the report.

    Exit code: 0 if the job succeeds, 1 if it fails or is cancelled, 2 for invalid usage or an
    invalid job spec, 130 after Ctrl-C.

    On this machine Ctrl-C cancels the job. If its controller is killed, another one starts; if this
    whole command is killed, the agents keep training for spec.recovery.controllerAbsenceSeconds
    (15 minutes), and `holdfast attach` takes the job over. With --kubernetes or --ray the job runs
    in the cluster, with a copy of the spec's directory: Ctrl-C leaves it running, and `holdfast
    attach` watches it again.

    A script needs no spec: run prints the spec that it makes of the options; --save writes it.

    Examples: `holdfast run examples/stdlib-bytes.yaml`,
    `holdfast run train.py --nodes 2 --workers 2 -- --lr 3e-4`,
    `holdfast run -- torchrun --nproc_per_node 2 train.py`
    """
SUBMIT = """Start a job as `holdfast run` does, and return: `holdfast attach` watches it.

    On this machine a process in the background runs its controller.

    Examples: `holdfast submit examples/stdlib-bytes.yaml --kubernetes`,
    `holdfast submit train.py --nodes 2 --workers 2 --ray http://HEAD:8265 -- --lr 3e-4`
    """


def register(app: typer.Typer, panel: str) -> None:
    app.command("run", help=RUN, rich_help_panel=panel)(with_target(start, returns=False))
    app.command("submit", help=SUBMIT, rich_help_panel=panel)(
        with_target(start, returns=True, lines=None, page=False)
    )
    for command in (attach, again):
        app.command(rich_help_panel=panel)(with_target(command))


def start(
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
    runtime_env: RuntimeEnvOption = None,
    lines: LinesOption = None,
    as_json: ReportOption = False,
    page: PageOption = False,
    *,
    returns: bool,
    target: Target,
) -> None:
    """`holdfast run`, and `submit`, which `returns` once the job exists."""
    from ..targets.base import Launch, RunsEnded

    def begin(launch: Launch) -> int:
        if returns:
            return _submit(target, launch, as_json)
        with provided("ui beside a run", "ui", "--ui", target) if page else nullcontext():
            return _shown(target, as_json, lines, lambda display: target.run(launch, display))

    def show(text: str) -> None:
        with ignoring_closed_output():
            (stderr() if as_json else stdout()).print(text, markup=False, soft_wrap=True)

    script = asked(
        file, words, save,
        nodes=nodes, workers=workers, gpus=gpus, name=name, env=env, python=python,
        resume_args=resume_args,
    )  # fmt: skip
    if runtime_env is not None and not target.takes_runtime_env:
        raise UserError.of("--runtime-env", str(runtime_env), "it with --ray http://HEAD:8265")
    if target.takes_runtime_env and not returns and (lines or as_json):
        got = f"it with `{target.command('run')}`"
        expected = "it with `attach`, after `submit`: run shows what the Ray job prints"
        raise UserError.of("--json" if as_json else "--logs", got, expected)
    if script is None and file is None:
        raise UserError("FILE: got nothing; expected a TrainingJob in YAML, or a script")
    if script is None:
        assert file is not None
        raise typer.Exit(begin(Launch(file, file.absolute().parent, None, runtime_env)))
    local = isinstance(target, RunsEnded)
    script = replace(script, is_local=local)
    with spec_file(script, save, target.free_name, show, uploads=not local) as (document, shown):
        directory = Path.cwd() if save is None else save.absolute().parent
        raise typer.Exit(begin(Launch(document, directory, script, runtime_env, shown)))


def _submit(target: Target, launch: Launch, as_json: bool) -> int:
    """Start a job without showing it. The exit code."""
    from ..display import SilentDisplay

    done = target.submit(launch, SilentDisplay(stderr()))
    if as_json:
        print_json(done)
        return 0
    where = f" as Ray job {done['ray_job']}" if "ray_job" in done else ""
    hint = target.command("attach", done["job"])
    typer.echo(f"job {done['job']}: submitted{where}; watch it with `{hint}`")
    return 0


def _shown(
    target: Target, as_json: bool, lines: bool | None, run_job: Callable[[Display], RunResult]
) -> int:
    """Show a job until it ends, then print the report. The exit code."""
    from ..display import SilentDisplay, make_display
    from ..report import report

    if lines and as_json:
        raise UserError.of("--logs", "--logs and --json", "only one of them")
    console = stderr() if as_json else stdout()
    display = SilentDisplay(console) if as_json else make_display(console, lines)
    done = run_job(display)
    if done.view is not None:
        with ignoring_closed_output():
            if as_json:
                print_json(done.view)
            else:
                can_read = target.can_read(done.view.checkpoint_path)
                console.print(report(done.view, command=target.command, can_read=can_read))
    return done.exit_code


def attach(
    job: JobArgument, lines: LinesOption = None, as_json: ReportOption = False, *, target: Target
) -> None:
    """Watch a job until it ends, then print the report, with the exit code of `holdfast run`.

    On this machine attach takes a job over whose controller died. Ctrl-C leaves a job running that
    another process controls.

    Example: `holdfast attach my-job`
    """
    raise typer.Exit(_shown(target, as_json, lines, lambda display: target.attach(job, display)))


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
    remote = target.find(job)
    view = remote.view()
    before = view.generation
    if file is None and view.state in TERMINAL and isinstance(target, RunsEnded):
        raise typer.Exit(_shown(target, as_json, lines, lambda shown: target.run_ended(job, shown)))
    if lines:
        expected = "it for a job that has ended; `holdfast logs -f` shows a running job's output"
        raise UserError.of("--logs", f"it with {job}, which runs", expected)
    directory = None
    if file is not None:
        directory = file if file.is_dir() else file.absolute().parent
    answer = remote.again(directory)
    if not as_json:
        typer.echo(f"job {job}: {answer.detail}")
    view = remote.view()
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
        step = f", {plural(view.step + 1, 'step')}" if view.step >= 0 else ""
        text = f"generation {view.generation} runs the new code after {seconds:.1f} s{step}"
        typer.echo(f"job {job}: {text}")
