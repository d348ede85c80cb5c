"""The text output of `holdfast plan`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ..planner import Plan
from ..planner.costs import device_bytes
from ..protocol.host_memory import describe
from ..protocol.mesh import AXES
from .output import columns, count, plural, size

MEMORY_OWNERS = {"device": "each worker", "node": "each node", "storage": "storage"}
MAX_NODES_SHOWN = 16


def render(plan: Plan) -> Group:
    return Group(*_parts(plan))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    head = Text(plan.job, style="bold")
    world = plural(plan.mesh.world_size, "worker")
    head.append(
        f"  {plan.strategy} on {plural(plan.num_nodes, 'node')}, {world}: {plan.mesh.describe()}",
        style="",
    )
    yield head
    yield f"why: {plan.why}"
    each = plural(plan.gpus_per_worker, "GPU") if plan.gpus_per_worker else "none"
    yield f"GPUs of a worker: {each} ({plan.gpus_why})"
    yield f"fabric: {plan.fabric} ({plan.fabric_why})"
    if plan.parameters is not None and plan.flops_per_step is not None:
        yield (
            f"model: {count(plan.parameters)} parameters, {plan.flops_per_step:.2e} FLOPs per "
            f"step; micro-batch {plan.micro_batch}, {plan.num_micro_batches} per step and rank"
        )
    for warning in plan.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    yield from _sizes(plan)
    yield from _ranks(plan)
    yield from _memory(plan)
    yield from _traffic(plan)
    yield from _environment(plan)


def _section(title: str) -> Iterator[RenderableType]:
    yield ""
    yield Text(title, style="bold")


def _sizes(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Mesh for each number of nodes")
    table = columns("nodes", "used", "mesh", "samples per rank", "memory", "why")
    for item in plan.sizes:
        table.add_row(
            str(item.nodes),
            str(item.nodes_used) if item.mesh else "-",
            item.mesh.describe() if item.mesh else "job waits",
            f"{item.samples_per_rank:g}" if item.samples_per_rank is not None else "",
            size(item.device_bytes) if item.device_bytes is not None else "",
            item.why,
        )
    table.columns[-1].no_wrap = False
    yield table


def _ranks(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Ranks")
    axes = [a for a, n in zip(AXES, plan.mesh.sizes, strict=True) if n > 1] or ["replicate"]
    table = columns("node", "rank", "local rank", "shard", *axes)
    for node in plan.nodes[:MAX_NODES_SHOWN]:
        for rank in node.ranks:
            at = [str(rank.coordinates[axis]) for axis in axes]
            cells = (str(node.node_rank), str(rank.rank), str(rank.local_rank), str(rank.shard))
            table.add_row(*cells, *at)
    yield table
    left = len(plan.nodes) - MAX_NODES_SHOWN
    if left > 0:
        yield f"... and {plural(left, 'more node')}; --json shows all"


def _memory(plan: Plan) -> Iterator[RenderableType]:
    if not plan.memory:
        yield from _section("Memory")
        yield "unknown: the script defines the model"
        return
    yield from _section("Memory")
    table = columns("where", "what", "bytes", "by", "formula")
    for row in plan.memory:
        by = "exact" if row.exact else "estimate"
        table.add_row(MEMORY_OWNERS[row.where], row.what, size(row.num_bytes), by, row.formula)
    table.columns[-1].no_wrap = False
    yield table
    total = size(device_bytes(plan.memory))
    limit = f" of {size(plan.device_memory_bytes)}" if plan.device_memory_bytes else ""
    yield f"each worker: about {total}{limit}"
    if plan.host_memory is not None:
        yield f"each node, main memory: {describe(plan.host_memory)}"


def _traffic(plan: Plan) -> Iterator[RenderableType]:
    if not plan.traffic:
        return
    yield from _section("Sent by each rank in a step")
    table = columns("what", "group", "bytes", "formula")
    for row in plan.traffic:
        table.add_row(row.what, row.group, size(row.num_bytes), row.formula)
    yield table


def _environment(plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Environment of rank 0")
    table = columns("variable", "value", "from", "why")
    for setting in plan.environment:
        table.add_row(setting.name, setting.value, setting.source, setting.why)
    table.columns[-1].no_wrap = False
    yield table
