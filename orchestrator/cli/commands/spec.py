"""`holdfast validate | plan | schema`: check and explain a job without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import Problem, SpecError, UserError

from ..options import FileArgument, JsonOption
from ..output import plural, print_json, stdout


def register(app: typer.Typer, panel: str) -> None:
    for command in (validate, plan, schema):
        app.command(rich_help_panel=panel)(command)


def validate(file: FileArgument, as_json: JsonOption = False) -> None:
    """Check a job without running it: fields, mesh, script, data and checkpoint path.

    Lists every problem with the field, the value, what was expected and the fix; exit code 2.
    """
    from holdfast.orchestrator.api.v1alpha1.remarks import remarks
    from holdfast.orchestrator.planner.choose import choose_mesh, smallest_device

    from ..preflight import load_checked, local_facts, with_local_gpus

    try:
        job, gpus = with_local_gpus(load_checked(file), str(file))
    except SpecError as error:
        if not as_json:
            raise
        problems = [vars(problem) for problem in error.problems]
        print_json({"valid": False, "file": str(file), "problems": problems})
        raise typer.Exit(2) from None
    memory = smallest_device(job, [local_facts(job.spec.workers_per_node)])
    chosen = choose_mesh(job, job.spec.nodes.max, memory)
    assert chosen is not None, "validation let an impossible mesh through"
    mesh, why = chosen
    if as_json:
        facts = {"mesh": mesh, "why": why, "gpu": job.spec.resources.num_gpus, "gpu_why": gpus}
        notes = remarks(job)
        print_json({"valid": True, "file": str(file), "job": job.name, **facts, "remarks": notes})
        return
    nodes, workers = job.spec.nodes.max, job.spec.workers_per_node
    typer.echo(
        f"{file}: valid; job {job.name} on {plural(nodes, 'node')} x "
        f"{plural(workers, 'worker')}, {mesh.strategy}: {mesh.describe()}"
    )
    for text in filter(None, (gpus, *remarks(job))):
        typer.echo(f"note: {text}")


def plan(
    file: FileArgument,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            max=limits.MAX_NODES,
            help="Plan for this number of nodes; may exceed nodes.max, as after a resize.",
            show_default="nodes.max",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="QUANTITY",
            help="Memory of one worker's device, such as 80Gi.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would run where, and why: mesh, ranks, environment, memory, network traffic.

    The plan assumes nodes like this machine. Nothing is started.

    Example: `holdfast plan examples/stdlib-bytes.yaml --nodes 1`
    """
    from holdfast.orchestrator.api.v1alpha1 import load_job
    from holdfast.orchestrator.api.v1alpha1.base import parse_quantity
    from holdfast.orchestrator.core.rank_assignment import check_resize, resized
    from holdfast.orchestrator.planner import make_plan

    from ..plan_text import render
    from ..preflight import local_facts, with_local_gpus

    job, gpus = with_local_gpus(load_job(file), str(file))
    if nodes is not None and nodes > job.spec.nodes.max:
        if problem := check_resize(job, nodes):
            raise UserError(f"--{problem}")
        job = resized(job, nodes)
    memory = None
    if device_memory is not None:
        try:
            memory = int(parse_quantity(device_memory))
        except ValueError as error:
            expected = str(error).removeprefix("expected ")
            raise UserError(str(Problem("--device-memory", device_memory, expected))) from None
    facts = local_facts(job.spec.workers_per_node)
    made = make_plan(job, facts, nodes, memory, gpus=gpus)
    if made is None:
        low, high = job.spec.nodes.min, job.spec.nodes.max
        expected = f"{low} to {high} nodes that hold at least one replica group"
        raise UserError(str(Problem("--nodes", str(nodes), expected)))
    if as_json:
        print_json(made)
        return
    console = stdout()
    console.print(render(made), soft_wrap=not console.is_terminal)


def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the reference page in Markdown instead.")
    ] = False,
    crd: Annotated[
        bool,
        typer.Option("--crd", help="Print the CustomResourceDefinition for Kubernetes instead."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of a TrainingJob, for editors and CI.

    Example for the YAML language server: `holdfast schema -o trainingjob.schema.json`
    """
    import json

    from holdfast.orchestrator.api.v1alpha1.schema import json_schema, reference_page

    if markdown and crd:
        raise UserError(str(Problem("--markdown", "--markdown and --crd", "only one of them")))
    if crd:
        try:
            from holdfast.orchestrator.kube.definition import definition_text
        except ModuleNotFoundError as error:
            got = f"--crd, but the package {error.name} is not installed"
            fix = "pip install '.[kubernetes]' in a checkout of Holdfast"
            raise UserError(str(Problem("--crd", got, "it installed", fix))) from None
        text = definition_text()
    else:
        text = reference_page() if markdown else json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        got = f"{output} ({error.strerror})"
        raise UserError(str(Problem("--output", got, "a writable file"))) from None
