"""`holdfast submit`: submit a job to a Ray cluster through its Jobs API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..options import JsonOption, ray_address
from ..output import print_json, stderr, stdout
from ..script_job import (
    EnvOption,
    GpusOption,
    NameOption,
    NodesOption,
    PythonOption,
    ResumeOption,
    WordsArgument,
    WorkersOption,
    asked,
)


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(submit)


def submit(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A TrainingJob in YAML, or a training script in Python.",
            show_default=False,
        ),
    ],
    ray: Annotated[
        str,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="http://HEAD:8265, or auto in the cluster.",
            show_default="$RAY_ADDRESS, or auto",
        ),
    ] = "",
    runtime_env: Annotated[
        Path | None,
        typer.Option(
            "--runtime-env", metavar="FILE", help="Ray's runtime_env in YAML: pip, env_vars, ..."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the job's output until it ends.")
    ] = False,
    words: WordsArgument = None,
    nodes: NodesOption = None,
    workers: WorkersOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    env: EnvOption = None,
    python: PythonOption = None,
    resume_args: ResumeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job to a Ray cluster. It appears in `ray job list` and in Ray's dashboard.

    With a script, submit uploads the directory of the spec (without a spec, the current one) as
    Ray's working_dir, without secrets. `ray job stop` cancels the job. With --follow the exit code
    is that of `holdfast run`; otherwise it is 0 once the job is submitted.

    Examples: `holdfast submit examples/stdlib-bytes.yaml --ray http://head:8265`,
    `holdfast submit train.py --nodes 2 --workers 2 -- --lr 3e-4`
    """
    from ..targets.ray.jobs_api import submit as submit_job

    address = ray_address(ray)
    wanted = asked(
        file, words,
        nodes=nodes, workers=workers, gpus=gpus, name=name, env=env, python=python,
        resume_args=resume_args,
    )  # fmt: skip
    show = partial((stderr() if as_json else stdout()).print, markup=False, soft_wrap=True)
    submitted = submit_job(file, address, runtime_env, show, attach=follow, without_spec=wanted)
    for note in submitted.remarks:
        typer.echo(f"note: {note}", err=True)
    if submitted.exit_code is not None:
        raise typer.Exit(submitted.exit_code)
    if as_json:
        print_json({"ray_job": submitted.ray_job, "job": submitted.job})
        return
    job, log = submitted.job, f"ray job logs -f {submitted.ray_job}"
    if "://" in address:
        log += f" --address {address}"
    typer.echo(
        f"submitted as Ray job {submitted.ray_job}; watch it with `holdfast status {job} --ray "
        f"{address}`, see its log with `{log}`"
    )
