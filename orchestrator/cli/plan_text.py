"""The text output of `holdfast spec plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..explorer.advice import NOTHING_HELPS
from ..explorer.estimate import Estimate, TimePlan
from ..explorer.model_plan import ModelPlan
from ..explorer.plan import Plan
from ..explorer.ranking import Alternative
from ..explorer.strategies import Strategies
from ..planner.memory import USABLE
from ..planner.terms import CATEGORIES
from ..protocol.host_memory import describe
from ..protocol.mesh import AXES
from .output import columns, count, plural, seconds, size

MAX_NODES_SHOWN = 16
MAX_ALTERNATIVES_SHOWN = 8
MAX_LOST_SHOWN = 4


def render(plan: Plan | ModelPlan, *, explain: bool = False, environment: bool = False) -> Group:
    """`explain`: formula, numbers and source of each figure. `environment`: ranks and environment
    of a job."""
    if isinstance(plan, ModelPlan):
        return Group(*_model_parts(plan, explain))
    return Group(*_job_parts(plan, explain, environment))


def _section(title: str) -> Iterator[RenderableType]:
    yield ""
    yield Text(title, style="bold")


# -- of a job -----------------------------------------------------------------------------------
def _job_parts(plan: Plan, explain: bool, environment: bool) -> Iterator[RenderableType]:
    yield _verdict(plan)
    head = f"{plan.strategy} on {plural(plan.num_nodes, 'node')}, "
    head += f"{plural(plan.mesh.world_size, 'worker')}: {plan.mesh.describe()}"
    yield head
    yield f"why: {plan.why}"
    for way in plan.ways:
        yield f"fits with {way.describe()}"
    if plan.fits is False and not plan.ways:
        yield NOTHING_HELPS
    each = plural(plan.gpus_per_worker, "GPU") if plan.gpus_per_worker else "none"
    yield f"GPUs of a worker: {each} ({plan.gpus_why})"
    yield f"fabric: {plan.fabric} ({plan.fabric_why})"
    figures = plan.estimate
    if figures is not None and plan.parameters is not None:
        yield (
            f"model: {count(plan.parameters)} parameters, {figures.flops_per_step:.2e} FLOPs per "
            f"step; micro-batch {figures.micro_batch}, {figures.num_micro_batches} per step and "
            f"rank"
        )
    if plan.micro_batch_why:
        yield plan.micro_batch_why
    if plan.offload_memory:
        yield f"offload: {plan.offload_memory}"
    for warning in plan.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    if plan.strategies is not None:
        yield from _strategies(plan.strategies)
    yield from _sizes(plan)
    if figures is None:
        yield from _section("Memory")
        yield "unknown: the spec does not have the model's sizes; plan one like it with --model"
    else:
        yield from _figures(figures, plan.device_memory_bytes, explain)
        yield from _host(plan, explain)
    if environment:
        yield from _ranks(plan)
        yield from _environment(plan)
    else:
        yield ""
        yield "ranks and the environment of a worker: --environment"


def _verdict(plan: Plan) -> Text:
    figures, memory = plan.estimate, plan.device_memory_bytes
    if figures is not None and memory is None and plan.fits is False:
        where = "main memory of its node"
        text = f"{plan.job}: does not fit: the states of a worker alone fill its share of the "
        return Text(text + where, "bold red")
    if figures is None or memory is None:
        what = "the model is" if figures is None else "the memory of the devices is"
        fix = "" if figures is None else "; pass --devices, such as 64xH100-80"
        return Text(f"{plan.job}: not checked whether it fits: {what} not known{fix}", "bold")
    numbers = f"{size(figures.peak_bytes)} of {size(memory)} per worker by estimate"
    if plan.fits:
        text = f"{plan.job}: fits: {numbers}"
        if figures.time is not None:
            text += f"; {figures.time.tokens_per_s:,.0f} tokens/s, MFU {figures.time.mfu:.0%}"
        return Text(text, "bold green")
    over = "above the 80 % that never ran out" if figures.peak_bytes <= memory else "too much"
    if figures.peak_bytes <= USABLE * memory:
        over = f"but offloaded states do not fit into {plan.offload_memory}"
    return Text(f"{plan.job}: does not fit: {numbers}, {over}", "bold red")


def _sizes(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Mesh for each number of nodes")
    table = columns("nodes", "used", "mesh", "samples per rank", "memory", "why")
    for item in plan.sizes:
        table.add_row(
            str(item.nodes), str(item.nodes_used) if item.mesh else "-",
            item.mesh.describe() if item.mesh else "job waits",
            f"{item.samples_per_rank:g}" if item.samples_per_rank is not None else "",
            size(item.device_bytes) if item.device_bytes is not None else "", item.why,
        )  # fmt: skip
    yield table


def _host(plan: Plan, explain: bool) -> Iterator[RenderableType]:
    yield from _section("Main memory of a node, and storage")
    table = columns("where", "what", "bytes", *(["by", "formula"] if explain else []))
    for row in plan.host:
        where = "each node" if row.where == "node" else "storage"
        more = ["exact" if row.exact else "estimate", row.formula] if explain else []
        table.add_row(where, row.what, size(row.num_bytes), *more)
    yield table
    if plan.host_memory is not None:
        yield describe(plan.host_memory)


def _ranks(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Ranks")
    axes = [a for a, n in zip(AXES, plan.mesh.sizes, strict=True) if n > 1] or ["replicate"]
    table = columns("node", "rank", "local rank", "state shard", *axes)
    for node in plan.nodes[:MAX_NODES_SHOWN]:
        for rank in node.ranks:
            at = [str(rank.coordinates[axis]) for axis in axes]
            cells = (str(node.node_rank), str(rank.rank), str(rank.local_rank), str(rank.shard))
            table.add_row(*cells, *at)
    yield table
    left = len(plan.nodes) - MAX_NODES_SHOWN
    if left > 0:
        yield f"... and {plural(left, 'more node')}; --json shows all"


def _environment(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Environment of rank 0")
    table = columns("variable", "value", "from", "why")
    for setting in plan.environment:
        table.add_row(setting.name, setting.value, setting.source, setting.why)
    yield table


# -- of a model ---------------------------------------------------------------------------------
def _model_parts(plan: ModelPlan, explain: bool) -> Iterator[RenderableType]:
    yield Text(plan.verdict, "bold green" if plan.fits else "bold red")
    yield (
        f"sequences of {plan.sequence_length:,} tokens, {plan.global_batch:,} in a step; "
        f"{_format(plan)} with float32 reduction, compiled blocks, AdamW; "
        f"{plan.network} between nodes; {plan.num_considered:,} layouts considered"
    )
    if plan.offload_memory:
        yield f"offload: {plan.offload_memory}"
    if plan.method != "full":
        yield (
            f"adapters of rank 16 on all matrices of the blocks: {plan.trained / 1e6:.1f} M "
            f"trained ({plan.trained / plan.parameters:.2%}), "
            f"{12 * plan.trained / 2**20:,.0f} MiB in a checkpoint; "
            f"merged: {plan.merged_bytes / 2**30:.1f} GiB"
        )
    yield from _strategies(plan)
    if plan.estimate is not None:
        yield from _figures(plan.estimate, plan.device_memory_bytes, explain)
    if plan.own_loop_bytes is not None and plan.chosen is not None:
        yield ""
        yield _own_loop(plan.own_loop_bytes, plan.chosen.peak_bytes)
    if plan.spec is not None:
        yield ""
        yield "the job that launches the first one: --save job.yaml"


def _own_loop(num_bytes: int, planned: int) -> str:
    text = f"in a script that wraps only blocks and model with fully_shard: {num_bytes / 2**30:.1f}"
    if num_bytes <= planned:
        return f"{text} GiB, as planned"
    return f"{text} GiB; wrap embedding and head too, as the recipe does"


def _format(plan: ModelPlan) -> str:
    if plan.format == "bfloat16":
        return plan.format
    return f"{plan.format} (the device has no bfloat16) and a loss scale,"


def _strategies(plan: ModelPlan | Strategies) -> Iterator[RenderableType]:
    if plan.alternatives:
        yield from _section("Strategies that fit, best first")
        yield _ranking(plan.alternatives, plan.of_job if isinstance(plan, Strategies) else None)
        left = len(plan.alternatives) - MAX_ALTERNATIVES_SHOWN
        if left > 0:
            yield f"... and {left} more; --json shows all"
    if plan.lost:
        yield from _section("Strategies that do not fit")
        table = columns("strategy", "devices", "mesh", "why")
        for row in plan.lost[:MAX_LOST_SHOWN]:
            table.add_row(row.strategy, _devices(row), row.mesh.describe(), row.why)
        yield table
        left = len(plan.lost) - MAX_LOST_SHOWN
        if left > 0:
            yield f"... and {left} more; --json shows all"


def _ranking(alternatives: Sequence[Alternative], of_job: int | None) -> RenderableType:
    """`of_job`: index of the job's own, which is always shown."""
    priced = any(candidate.dollars_per_billion_tokens for candidate in alternatives)
    names = ["strategy", "devices", "mesh", "batch", "settings", "memory", "tokens/s", "MFU"]
    names += [*(["$/B tokens"] if priced else []), "why it lost"]
    first = ("batch", "devices", "why it lost", "settings", "$/B tokens", "memory")
    table = columns(*names, leaves_out=first)
    for number, row in enumerate(alternatives):
        if number >= MAX_ALTERNATIVES_SHOWN and number != of_job:
            continue
        price = row.dollars_per_billion_tokens
        cells = [f"{price:,.0f}" if price is not None else ""] if priced else []
        table.add_row(
            f"{row.strategy}, this job" if number == of_job else row.strategy,
            _devices(row), row.mesh.describe(), f"{row.micro_batch} x {row.num_micro_batches}",
            _settings(row.settings), size(row.peak_bytes), f"{row.tokens_per_s:,.0f}",
            f"{row.mfu:.0%}", *cells, row.why,
        )  # fmt: skip
    return table


def _devices(one: Alternative) -> str:
    return f"{one.devices} x {one.device}"


def _settings(settings: dict[str, Any]) -> str:
    words = []
    for name, value in settings.items():
        if name == "activationCheckpointing":
            ((choice, inside),) = value.items()
            words.append(" ".join(["AC", choice, *inside.get("keep", ())]))
        elif name == "fsdp":
            groups = value["reshardAfterForward"]
            words.append("no reshard" if groups is False else f"reshard {groups}")
        elif name == "pipeline":
            words += [value["schedule"]] if "schedule" in value else []
        elif name == "loss":
            words.append("chunked loss")
        elif name == "offload":
            words.append("CPU offload")
        else:
            words.append(str(value))
    return ", ".join(words) or "-"


# -- figures of one layout ----------------------------------------------------------------------
def _figures(
    figures: Estimate, memory_bytes: int | None, explain: bool
) -> Iterator[RenderableType]:
    limit = f" of {size(memory_bytes)}" if memory_bytes else ""
    peak = f"{size(figures.peak_bytes)}{limit}, in the phase: {figures.peak_phase}"
    yield from _section(f"Memory of a worker's device: {peak}")
    yield _memory(figures, explain)
    yield from _section("Sent by each rank in a step")
    if figures.traffic:
        yield _traffic(figures, explain)
    else:
        yield "nothing: one rank"
    if figures.time is not None:
        yield from _time(figures.time, explain)


def _memory(figures: Estimate, explain: bool) -> RenderableType:
    sums = figures.categories()
    if not explain:
        table = columns("category", "bytes", "share")
        for name in CATEGORIES:
            if name in sums:
                share = f"{sums[name] / figures.peak_bytes:.0%}" if figures.peak_bytes else ""
                table.add_row(name, size(sums[name]), share)
        return table
    names = ("category", "what", "bytes", "in", "by", "formula", "source")
    table = columns(*names, leaves_out=("source", "in", "by"))
    for row in figures.memory:
        by = "exact" if row.exact else "estimate"
        phases = "all phases" if len(row.phases) == len(figures.phases) else ", ".join(row.phases)
        cells = (row.category, row.what, size(row.num_bytes), phases, by, row.formula, row.source)
        table.add_row(*cells)
    for phase, num_bytes in figures.phases.items():
        table.add_row("sum", phase, size(num_bytes), "", "", "", "")
    return table


def _traffic(figures: Estimate, explain: bool) -> RenderableType:
    timed = figures.time is not None
    names = ["what", "collective", "group", "bytes", "calls"]
    names += [*(["link", "time"] if timed else []), *(["formula", "source"] if explain else [])]
    table = columns(*names, leaves_out=("source", "group", "calls", "link", "formula"))
    for row in figures.traffic:
        cells = [row.what, row.collective, row.group, size(row.num_bytes), str(row.calls)]
        if timed:
            cells += [row.link, seconds(row.seconds) if row.seconds is not None else ""]
        table.add_row(*cells, *([row.formula, row.source] if explain else []))
    return table


def _time(time: TimePlan, explain: bool) -> Iterator[RenderableType]:
    yield from _section(
        f"A step on {time.device}: {seconds(time.seconds)}, {time.tokens_per_s:,.0f} tokens/s, "
        f"MFU {time.mfu:.1%}"
    )
    table = columns("part", "seconds", "share", "kind", *(["formula", "source"] if explain else []))
    for row in time.rows:
        kind = "exposed" if row.exposed else "compute"
        more = [row.formula, row.source] if explain else []
        share = f"{row.seconds / time.seconds:.0%}"
        table.add_row(row.what, seconds(row.seconds).removesuffix(" s"), share, kind, *more)
    yield table
    yield f"communication beside compute: {seconds(time.hidden_seconds)}"
    if time.calibration is not None:
        yield time.calibration.describe()
    if time.price is not None and time.dollars_per_day is not None:
        yield (
            f"price: ${time.dollars_per_day:,.0f} a day, "
            f"${time.dollars_per_billion_tokens:,.0f} per billion tokens, at "
            f"${time.price.per_hour:g} an hour and device ({time.price.source}, {time.price.date})"
        )
