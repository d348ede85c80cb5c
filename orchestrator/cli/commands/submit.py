"""`holdfast submit`: hand a job to a Ray cluster through its Jobs API and come back.

Owns: this verb. Must not: watch the job; `status`, `logs -f` and `ray job logs` do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import FileArgument, JsonOption, ray_address


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(submit)


def submit(
    file: FileArgument,
    ray: Annotated[
        str,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="http://HEAD:8265, or auto inside of it. Without ADDRESS: $RAY_ADDRESS, or auto.",
        ),
    ],
    runtime_env: Annotated[
        Path | None,
        typer.Option(
            "--runtime-env", metavar="FILE", help="Ray's runtime_env in YAML: pip, env_vars, ..."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show its lines until it ends.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Hand a job to a Ray cluster. It shows in `ray job list` and in Ray's dashboard.

    With a script, everything beside FILE goes along (Ray's working_dir). `ray job stop` cancels the
    job. Exit code as `holdfast run` with --follow; otherwise 0 when it was handed in.

    Example: `holdfast submit examples/stdlib-bytes.yaml --ray http://head:8265`
    """
    from ..output import print_json
    from ..targets.ray.jobs_api import submit as hand_in

    submitted, code = hand_in(file, ray_address(ray), runtime_env, attach=follow)
    if code is not None:
        raise typer.Exit(code)
    if as_json:
        print_json({"ray_job": submitted})
    else:
        typer.echo(f"submitted as Ray job {submitted}; see `ray job logs -f {submitted}`")
