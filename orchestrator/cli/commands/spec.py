"""`holdfast spec validate | schema`: check a job unstarted, and what a job may contain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.orchestrator.errors import SpecError, UserError

from ..options import FileArgument, JsonOption, provided
from ..output import plural, print_json, stdout


def register(app: typer.Typer, panel: str) -> None:
    for command in (validate, schema):
        app.command(rich_help_panel=panel)(command)


def validate(file: FileArgument, as_json: JsonOption = False) -> None:
    """Check a job without running it: fields, mesh, script, data and checkpoint path.

    Lists every problem with the field, the value, what was expected and the fix; exit code 2.
    """
    from holdfast.orchestrator.api.v1alpha1.remarks import remarks
    from holdfast.orchestrator.planner.choose import choose_mesh, memory_on
    from holdfast.orchestrator.planner.refusal import refusal
    from holdfast.orchestrator.protocol import training_packages

    from ..job_checks import load_checked, local_facts, with_local_gpus

    try:
        job, gpus = with_local_gpus(load_checked(file), str(file))
    except SpecError as error:
        if not as_json:
            raise
        problems = [vars(problem) for problem in error.problems]
        print_json({"valid": False, "file": str(file), "problems": problems})
        raise typer.Exit(2) from None
    memory = memory_on(job, [local_facts(job.spec.workers_per_node)])
    chosen = choose_mesh(job, job.spec.nodes.max, memory)
    assert chosen is not None, "validation let an impossible mesh through"
    mesh, why = chosen
    if problem := refusal(job, job.spec.nodes.max, mesh, memory):
        refused = SpecError([problem], str(file))
        if not as_json:
            raise refused
        print_json({"valid": False, "file": str(file), "problems": [vars(problem)]})
        raise typer.Exit(2)
    lacking = training_packages.problem(*job.spec.entrypoint.packages)
    here = [f"the job cannot run on this machine: {lacking}"] if lacking else []
    if as_json:
        facts = {"mesh": mesh, "why": why, "gpu": job.spec.resources.num_gpus, "gpu_why": gpus}
        notes = [*here, *remarks(job)]
        print_json({"valid": True, "file": str(file), "job": job.name, **facts, "remarks": notes})
        return
    nodes, workers = job.spec.nodes.max, job.spec.workers_per_node
    # A script without the session chooses its parallelism itself.
    where = ", " if job.spec.entrypoint.recipe is not None else "; with the session, "
    stdout().print(
        f"{file}: valid; job {job.name} on {plural(nodes, 'node')} x "
        f"{plural(workers, 'worker')}{where}{mesh.strategy}: {mesh.describe()}"
    )
    for text in filter(None, (gpus, *here, *remarks(job))):
        stdout().print(f"note: {text}")


def schema(
    crd: Annotated[
        bool,
        typer.Option("--crd", help="Print the CustomResourceDefinition for Kubernetes instead."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
) -> None:
    """Print the JSON schema of a TrainingJob, for editors and CI.

    Example for the YAML language server: `holdfast spec schema -o trainingjob.schema.json`
    """
    import json

    from holdfast.orchestrator.api.v1alpha1.schema import json_schema

    if crd:
        text = provided("resource definition", "kubernetes", "--crd")
    else:
        text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError.of("--output", f"{output} ({error.strerror})", "a writable file") from None
