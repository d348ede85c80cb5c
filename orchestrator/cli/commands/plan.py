"""`holdfast spec plan`: what a job or a model needs, and how long a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import UserError

from ..options import HomeOption, JsonOption
from ..output import print_json, stdout

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob
    from holdfast.orchestrator.catalogue.load import Catalogue
    from holdfast.orchestrator.catalogue.types import Device
    from holdfast.orchestrator.explorer.plan import Plan
    from holdfast.orchestrator.explorer.step_time import Hardware

DEFAULT_NETWORK = "infiniband-400"
TOKENS_PER_STEP = 4 * 2**20
"""Tokens per step of a model without a job: as Llama 3 405B began (Llama Team 2024, section
3.4.1)."""
DOES_NOT_FIT = 2


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(plan)


JobArgument = Annotated[
    Path | None, typer.Argument(help="Job file, JSON or YAML; or use --model.", metavar="JOB")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|CONFIG.JSON",
        help="Plan a model without a job: a name of the catalogue such as llama3-70b, or a "
        "config.json of Hugging Face.",
    ),
]
DevicesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--devices", "-d", metavar="COUNTxDEVICE",
        help="Devices, such as 64xH100-80; repeat the option to compare them.",
        show_default="this machine's",
    ),
]  # fmt: skip
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network", help="Link between nodes, by its name in the catalogue.",
        show_default=f"{DEFAULT_NETWORK}; of a job on this machine's devices by its fabric",
    ),
]  # fmt: skip
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, max=limits.MAX_NODES,
        help="Plan a job for this number of nodes; may exceed nodes.max, as after a resize.",
        show_default="nodes.max",
    ),
]  # fmt: skip
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--sequence", min=2, max=limits.MAX_COUNT, help="With --model: tokens of a sample.",
        show_default="8192, or the model's longest",
    ),
]  # fmt: skip
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method", metavar="full|lora|qlora",
        help="With --model: what is trained; adapters have rank 16 on all matrices of the blocks.",
        show_default="full",
    ),
]  # fmt: skip
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", min=1, max=limits.MAX_COUNT, help="With --model: samples of a step.",
        show_default="4 Mi tokens",
    ),
]  # fmt: skip
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory", metavar="QUANTITY",
        help="Memory of one worker's device, such as 80Gi, without --devices.",
    ),
]  # fmt: skip
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--host-memory", metavar="QUANTITY",
        help="Main memory of a node for offloaded states, such as 2Ti.",
        show_default="this machine's; with --devices or --model 240Gi for each device",
    ),
]  # fmt: skip
CatalogueOption = Annotated[
    Path | None,
    typer.Option(
        "--catalogue", envvar="HOLDFAST_CATALOGUE",
        help="YAML file with devices, links and models of your own.",
        show_default="beside ~/.config/holdfast",
    ),
]  # fmt: skip
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Show formula, numbers and source of every figure.")
]
EnvironmentOption = Annotated[
    bool, typer.Option("--environment", help="Show ranks and the environment of rank 0 too.")
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="With --model: write the best job.")
]
CalibrateOption = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Train a block of the job on this machine first, and plan with its times.",
    ),
]


def plan(
    file: JobArgument = None,
    model: ModelOption = None,
    devices: DevicesOption = None,
    network: NetworkOption = None,
    nodes: NodesOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    method: MethodOption = None,
    device_memory: DeviceMemoryOption = None,
    host_memory: HostMemoryOption = None,
    catalogue: CatalogueOption = None,
    explain: ExplainOption = False,
    environment: EnvironmentOption = False,
    save: SaveOption = None,
    calibrate: CalibrateOption = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether a job or a model fits, what would run where, how long a step takes, and why.

    Starts no job. Exit code 2 if the job does not fit.

    Examples: `holdfast spec plan job.yaml --devices 64xH100-80`,
    `holdfast spec plan --model llama3-70b --devices 64xH100-80`
    """
    from holdfast.orchestrator.catalogue.load import load_catalogue

    _expect_one_of(file, model)
    loaded, host = load_catalogue(catalogue), _memory("--host-memory", host_memory)
    if model is not None:
        of_job = {"--nodes": nodes, "--device-memory": device_memory}
        flags = {"--calibrate": calibrate or None, "--environment": environment or None}
        _refuse_with("--model", of_job | flags)
        between = network or DEFAULT_NETWORK
        planned: Any = _model_plan(
            loaded, model, devices or [], between, (sequence, batch, method or "full"), host
        )
    else:
        _refuse_with(
            "a job", {"--sequence": sequence, "--batch": batch, "--method": method, "--save": save}
        )
        assert file is not None
        measure, memory = (home, calibrate), (device_memory, host)
        planned = _job_plan(loaded, file, devices or [], network, nodes, memory, measure)
    if save is not None:
        _write(save, _job_text(planned))
    if as_json:
        print_json(planned)
    else:
        from ..plan_text import render

        stdout().print(render(planned, explain=explain, environment=environment))
    if planned.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _expect_one_of(file: Path | None, model: str | None) -> None:
    if (file is None) == (model is None):
        got = "a job and --model" if file else "neither a job nor --model"
        raise UserError.of("JOB", got, "one of them", "holdfast spec plan job.yaml")


def _refuse_with(what: str, given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            got = f"it with {what}" if value is True else f"{value} with {what}"
            raise UserError.of(option, got, "it without", "remove it")


# -- of a model ---------------------------------------------------------------------------------
def _model_plan(
    known: Catalogue, name: str, devices: list[str], network: str,
    of_step: tuple[int | None, int | None, str], host: int | None,
) -> Any:  # fmt: skip
    """`of_step`: tokens of a sample, samples, and what is trained."""
    from holdfast.orchestrator.catalogue.load import parse_devices
    from holdfast.orchestrator.explorer.model_plan import cluster_of, plan_model, recipe_has
    from holdfast.orchestrator.planner.adapters import NAMES
    from holdfast.orchestrator.planner.model import count_parameters
    from holdfast.orchestrator.planner.workload import Workload

    sequence, batch, method = of_step
    if method not in NAMES:
        raise UserError.of("--method", method, "full, lora or qlora")
    if not devices:
        raise UserError.of("--devices", "nothing with --model", "devices", "--devices 64xH100-80")
    architecture = _architecture(known, name)
    clusters = []
    for text in devices:
        count, device = parse_devices(text, known)
        if count > device.per_node and count % device.per_node:
            expected = f"whole nodes of {device.per_node} {device.name}"
            low = count // device.per_node * device.per_node
            fix = f"{low} or {low + device.per_node} of them"
            raise UserError.of("--devices", text, expected, fix)
        clusters.append(cluster_of(count, device, _hardware(known, device, network), host))
    tokens = sequence or min(8192, architecture.max_sequence_length or 8192)
    if 0 < architecture.learned_positions < tokens:
        most_tokens = f"at most {architecture.learned_positions}, its position embedding's rows"
        raise UserError.of("--sequence", f"{tokens} with {name}", most_tokens)
    most = max(cluster.devices for cluster in clusters)
    samples = batch or -(-max(TOKENS_PER_STEP // tokens, 1) // most) * most
    work = Workload(
        model=architecture,
        counts=count_parameters(architecture),
        sequence_length=tokens,
        global_batch=samples,
        compiled=True,
        own_loop=not recipe_has(architecture),
        method=method,
    )
    return plan_model(work, tuple(clusters))


def _architecture(known: Catalogue, name: str) -> Any:
    import json

    from holdfast.orchestrator.catalogue.hugging_face import architecture_of

    path = Path(name)
    if path.suffix != ".json":
        return known.architecture(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        got = f"{name} ({error.strerror})"
        raise UserError.of("--model", got, "a file that can be read") from None
    except (ValueError, RecursionError) as error:
        raise UserError.of("--model", f"{name} ({error})", "JSON") from None
    return architecture_of(config, path.parent.name or path.stem)


def _hardware(known: Catalogue, device: Device, network: str) -> Hardware:
    from holdfast.orchestrator.explorer.step_time import Hardware

    return Hardware(device, known.link(device.link), known.link(network))


# -- of a job -----------------------------------------------------------------------------------
def _job_plan(
    known: Catalogue, file: Path, devices: list[str], network: str | None,
    nodes: int | None, given: tuple[str | None, int | None],
    measure: tuple[Path | None, bool],
) -> Plan:  # fmt: skip
    """`given`: memory of a device as it is written, and bytes of a node's main memory; `measure`:
    the directory of measurements, and whether to measure now."""
    import msgspec

    from holdfast.orchestrator.api.v1alpha1 import load_job
    from holdfast.orchestrator.core.rank_assignment import check_resize, resized
    from holdfast.orchestrator.explorer.hardware import hardware_of
    from holdfast.orchestrator.explorer.plan import make_plan
    from holdfast.orchestrator.planner.choose import memory_on

    from ..calibration import with_calibration
    from ..job_checks import local_facts, with_local_gpus

    if devices and measure[1]:
        got = f"--devices {devices[0]} and --calibrate"
        raise UserError.of("--calibrate", got, "the devices of this machine", "leave --devices out")
    job, gpus = load_job(file), ""
    memory = _memory("--device-memory", given[0])
    facts = local_facts(job.spec.workers_per_node)
    hardware = None
    if devices:
        between = network or DEFAULT_NETWORK
        job, facts, count, hardware = _on_devices(known, job, facts, devices, between)
        gpus = f"--devices {devices[0]}"
        nodes = count if nodes is None else nodes
    else:
        job, gpus = with_local_gpus(job, str(file))
    if given[1] is not None:
        facts = msgspec.structs.replace(facts, memory_bytes=given[1])
    if nodes is not None and nodes > job.spec.nodes.max:
        known_memory = memory_on(job, [facts])
        if memory is not None:
            known_memory = known_memory._replace(device=memory)
        if problem := check_resize(job, nodes, known_memory):
            raise UserError(f"--{problem}")
        job = resized(job, nodes)
    if not devices:
        hardware = hardware_of(known, job, facts, nodes or job.spec.nodes.max, network or "")
        hardware = with_calibration(file, job, nodes, memory, facts, hardware, *measure)
    job_plan = make_plan(job, facts, nodes, memory, gpus=gpus, hardware=hardware)
    if job_plan is None:
        low, high = job.spec.nodes.min, job.spec.nodes.max
        expected = f"{low} to {high} nodes that hold at least one replica group"
        raise UserError.of("--nodes", str(nodes or high), expected)
    return job_plan


def _memory(option: str, written: str | None) -> int | None:
    from holdfast.orchestrator.api.v1alpha1.base import parse_quantity

    if written is None:
        return None
    try:
        return int(parse_quantity(written))
    except ValueError as error:
        expected = str(error).removeprefix("expected ")
        fix = "a device's name belongs into --devices"
        raise UserError.of(option, written, expected, fix) from None


def _on_devices(
    known: Catalogue, job: TrainingJob, facts: Any, devices: list[str], network: str
) -> tuple[TrainingJob, Any, int, Hardware]:
    """The job, a node of such devices, how many nodes they are, and what a step is timed on."""
    import msgspec

    from holdfast.orchestrator.catalogue.load import parse_devices
    from holdfast.orchestrator.planner.gpus import is_auto, with_gpus
    from holdfast.orchestrator.protocol.facts import Gpu

    if len(devices) > 1:
        got = f"{len(devices)} kinds with a job"
        raise UserError.of("--devices", got, "one kind", "compare with --model")
    count, device = parse_devices(devices[0], known)
    if is_auto(job):
        job = with_gpus(job, 1)
    workers, each = job.spec.workers_per_node, job.spec.resources.num_gpus
    if not each:
        fix = "remove resources.gpu: 0, or --devices"
        raise UserError.of("--devices", "a job on CPUs", "a job on GPUs", fix)
    if count % (workers * each):
        expected = f"whole nodes of {workers} workers x {each} GPU{'s' * (each > 1)}"
        raise UserError.of("--devices", devices[0], expected)
    gpu = Gpu(device.name, device.memory_bytes)
    facts = msgspec.structs.replace(
        facts, hostname="a node", address="10.0.0.1", gpus=(gpu,) * (workers * each),
        slots=workers, memory_bytes=0, cpus=0,
    )  # fmt: skip
    return job, facts, count // (workers * each), _hardware(known, device, network)


# -- files --------------------------------------------------------------------------------------
def _job_text(made: Any) -> str:
    from holdfast.orchestrator.api.v1alpha1 import yaml_text

    if made.spec is None:
        got = "nothing that fits" if made.chosen is None else f"{made.model}"
        expected = "a model that the recipe has: RMSNorm, SwiGLU, no biases, a head of its own"
        if made.chosen is not None and made.method != "full":
            got, expected = f"--method {made.method}", "full, which the recipe trains"
        raise UserError.of("--save", got, expected)
    return yaml_text(made.spec)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise UserError.of("--save", got, "a file that can be written") from None
