"""Bytes that one rank sends in one step, by group.

Owns: the formulas. Must not: know bandwidths. A ring collective over N ranks moves (N-1)/N of the
bytes per rank for a gather or a reduce-scatter, twice that for an all-reduce.

P parameters, S ranks of the shard group, R replica groups, m micro-batches, w bytes of a parameter
in forward and backward, g bytes of a gradient element when it is summed. Source: Rajbhandari et al.
2020 (ZeRO), section 7, in bytes instead of elements; FSDP2 gathers in the parameter format.
"""

from __future__ import annotations

import msgspec

from ..api.v1alpha1 import TrainingJob
from ..protocol.mesh import Mesh
from .memory import num_micro_batches, parameter_bytes
from .model import count_parameters


class Traffic(msgspec.Struct, frozen=True):
    """One line: what one rank sends per step within one kind of group."""

    what: str
    group: str
    num_bytes: int
    formula: str


def table(job: TrainingJob, mesh: Mesh) -> tuple[Traffic, ...]:
    """All lines for a recipe; empty for scripts and modules, whose model we do not know."""
    if job.spec.entrypoint.recipe is None:
        return ()
    settings = job.spec.entrypoint.recipe.config
    total = count_parameters(settings.model).total
    width = parameter_bytes(job)
    reduce = 4 if job.spec.parallelism.precision.reduce == "float32" else 2
    micro = num_micro_batches(settings, mesh)
    rows = []
    if mesh.shard > 1:
        gathers = 1 if job.spec.parallelism.reshard_after_forward is False else 2
        ring = (mesh.shard - 1) / mesh.shard
        group = f"shard, {mesh.shard} ranks"
        formula = f"{gathers} x m {micro} x {width} P x (S-1)/S"
        size = int(gathers * micro * width * total * ring)
        rows.append(Traffic("all-gather of parameters", group, size, formula))
        formula = f"m {micro} x {reduce} P x (S-1)/S"
        size = int(micro * reduce * total * ring)
        rows.append(Traffic("reduce-scatter of gradients", group, size, formula))
    if mesh.replicate > 1:
        ring = (mesh.replicate - 1) / mesh.replicate
        formula = f"2 x {reduce} P / S x (R-1)/R; S {mesh.shard}, R {mesh.replicate}"
        size = int(2 * reduce * total / mesh.shard * ring)
        group = f"replicate, {mesh.replicate} ranks"
        rows.append(Traffic("all-reduce of gradients", group, size, formula))
    return tuple(rows)
