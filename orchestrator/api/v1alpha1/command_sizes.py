"""The numbers in a launcher's line, compared with the spec, which has the sizes of a job.

A line with other numbers is refused.
"""

from __future__ import annotations

from holdfast.orchestrator.errors import Problem

from .launchers import Size
from .mesh_checks import SizedSpec

FIELD = "entrypoint.command"


def problem(spec: SizedSpec) -> str:
    """The first number that differs, in the `field: got; expected; fix` form, or ""."""
    for size in spec.entrypoint.program.sizes:
        if found := _PROBLEMS[size.of](spec, size):
            return str(found)
    return ""


def _of_nodes(spec: SizedSpec, size: Size) -> Problem | None:
    nodes = spec.nodes
    is_range = size.least != size.most
    if size.most == nodes.max and (not is_range or size.least == nodes.min):
        return None
    has = f"spec.nodes {{min: {nodes.min}, max: {nodes.max}}}"
    write = f"spec.nodes: {{min: {size.least if is_range else 1}, max: {size.most}}}"
    return _differs(size, has, write)


def _of_workers(spec: SizedSpec, size: Size) -> Problem | None:
    if size.most == spec.workers_per_node:
        return None
    has = f"spec.workersPerNode {spec.workers_per_node}"
    return _differs(size, has, f"spec.workersPerNode: {size.most}")


def _of_world(spec: SizedSpec, size: Size) -> Problem | None:
    nodes, workers = spec.nodes.max, spec.workers_per_node
    if size.most == nodes * workers:
        return None
    has = f"{nodes * workers} workers (nodes.max {nodes} x workersPerNode {workers})"
    if size.most % nodes:
        return _differs(size, has, f"nodes.max and workersPerNode with the product {size.most}")
    return _differs(size, has, f"spec.workersPerNode: {size.most // nodes}")


def _of_restarts(spec: SizedSpec, size: Size) -> Problem | None:
    restarts = spec.recovery.budgets.infrastructure.restarts
    if size.most == restarts:
        return None
    field = "spec.recovery.budgets.infrastructure.restarts"
    return _differs(size, f"{field} {restarts}", f"{field}: {size.most}")


def _differs(size: Size, has: str, write: str) -> Problem:
    got = f"{size.option} with {has}"
    return Problem(FIELD, got, "the same numbers", f"write {write}, or remove the option")


_PROBLEMS = {
    "nodes": _of_nodes,
    "workers": _of_workers,
    "world": _of_world,
    "restarts": _of_restarts,
}
