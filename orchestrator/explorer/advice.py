"""Changes that make a job fit that needs too much memory, and their costs: tried, not guessed.

Each way changes few fields of the spec. It is planned as the changed job would be, with the same
functions that launch it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter

from ..api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from ..api.v1alpha1.recipe import pretraining
from ..errors import SpecError
from ..planner.choose import choose_mesh, num_nodes_used
from ..planner.memory import (
    USABLE,
    WorkerMemory,
    device_bytes,
    main_memory_holds,
)
from ..planner.micro_batch import fitted_layout
from ..planner.workload import workload_of
from .search import CHUNK_TOKENS
from .step_time import Hardware, step_time

SHOWN = 3
NOTHING_HELPS = (
    "no change that was tried makes it fit, more nodes among them; use a smaller model, or devices "
    "with more memory"
)
MAX_CHANGES = 3


class Way(msgspec.Struct, frozen=True):
    """Changes of a spec with which the job fits."""

    changes: dict[str, Any]
    """Field below spec -> value."""
    num_bytes: int
    """Peak memory of a worker's device with them."""
    step_ratio: float | None = None
    """Time of a step / time of a step as it is; None: the hardware is not known."""
    device_ratio: float = 1.0
    """Devices / devices as it is."""

    def describe(self) -> str:
        """The fields to write, and the price."""
        text = ", ".join(f"{field}: {_written(value)}" for field, value in self.changes.items())
        text += f" ({self.num_bytes / 2**30:.1f} GiB per worker"
        if self.step_ratio is not None:
            text += f"; a step takes {self.step_ratio:.2f} x as long"
        if self.device_ratio != 1:
            text += f"; {self.device_ratio:g} x the devices"
        return text + ")"


class _Change(NamedTuple):
    """Fields that are changed together, as one alone would be refused."""

    fields: dict[str, Any]
    """Field below spec -> value."""
    weight: float
    """Distance from what the user wrote; ways are ordered by their sum."""


def ways_to_fit(
    job: TrainingJob, num_nodes: int, memory: WorkerMemory, hardware: Hardware | None = None
) -> tuple[Way, ...]:
    """The SHOWN nearest combinations of at most MAX_CHANGES changes with which a recipe fits, the
    nearest first; none for scripts, and where the memory of the devices is not known. A job on CPUs
    has to fit into main memory."""
    if memory.device is None and not job.spec.resources.num_gpus:
        memory = memory._replace(device=memory.host)
    if workload_of(job) is None or memory.device is None:
        return ()
    as_it_is = _planned(job, num_nodes, memory, hardware)
    ways: list[tuple[float, Way, frozenset[str]]] = []
    for combination in itertools.product(*([None, *group] for group in _options(job, num_nodes))):
        changes = [change for change in combination if change is not None]
        if not 0 < len(changes) <= MAX_CHANGES:
            continue
        fields = frozenset(f"{change.fields}" for change in changes)
        if any(smaller <= fields for _, _, smaller in ways):
            continue  # less suffices
        way = _way(job, num_nodes, memory, hardware, changes, as_it_is)
        if way is not None:
            cost = sum(change.weight for change in changes) + len(changes)
            ways = [other for other in ways if not fields < other[2]]
            ways.append((cost, way, fields))
    ways.sort(key=lambda one: (one[0], one[1].num_bytes, sorted(one[2])))
    distinct: dict[frozenset[str], Way] = {}
    for _, way, _ in ways:
        distinct.setdefault(frozenset(way.changes), way)
    return tuple(distinct.values())[:SHOWN]


def fix(job: TrainingJob, num_nodes: int, memory: WorkerMemory) -> str:
    """Fields to set, for the message that rejects a job."""
    ways = "; or ".join(way.describe() for way in ways_to_fit(job, num_nodes, memory))
    return f"set {ways}" if ways else NOTHING_HELPS


def _options(job: TrainingJob, num_nodes: int) -> Iterator[list[_Change]]:
    """The values of each field that may be tried, beside leaving it."""
    parallelism = job.spec.parallelism
    inner = parallelism.inner
    world = num_nodes * job.spec.workers_per_node
    yield [_Change({"nodes.max": times * num_nodes}, times) for times in (2, 4, 8)]
    if isinstance(parallelism.shard, int):
        sizes = range(parallelism.shard + 1, world // inner + 1)
        fitting = [n for n in sizes if (world // inner) % n == 0]
        yield [_Change(_shard_fields(job, n), 0.1 * n / parallelism.shard) for n in fitting[:6]]
    if parallelism.pipeline:  # its ranks keep whole gradients of their stages
        yield [_Change({"parallelism.pipeline": None}, 0.5)]
    elif not parallelism.fsdp and not parallelism.ddp:
        yield [*_raised(job, "pipeline", 1, world)]
    yield [*_raised(job, "tensor", parallelism.tensor, job.spec.workers_per_node)]
    yield [*_raised(job, "context", parallelism.context, world)]
    yield from _savings(job)


def _savings(job: TrainingJob) -> Iterator[list[_Change]]:
    """Changes that save memory of a rank and leave the mesh."""
    parallelism, config = job.spec.parallelism, pretraining(job.spec.entrypoint.recipe)
    assert config is not None
    weights = {"none": {"selective": 0.0, "full": 0.1}, "selective": {"full": 0.1}}
    if others := weights.get(parallelism.activation_checkpointing.chosen):
        field = "parallelism.activationCheckpointing"
        yield [_Change({field: {name: {}}}, weight) for name, weight in others.items()]
    if config.micro_batch not in (1, "auto"):
        yield [_Change({"entrypoint.recipe.config.microBatch": 1}, 0.2)]
    if not config.loss.chunk_tokens:
        yield [_Change({"entrypoint.recipe.config.loss.chunkTokens": CHUNK_TOKENS}, 0.2)]
    if parallelism.offload == "none" and job.spec.resources.num_gpus:
        yield [_Change({"parallelism.offload": "cpu"}, 3.0)]


_RAISED = {"tensor": 0.6, "context": 0.8, "pipeline": 1.0}
"""Axis -> weight of making it larger: more than less memory by other means, less than devices."""


def _raised(job: TrainingJob, axis: str, size: int, most: int) -> Iterator[_Change]:
    """A larger axis of a model. Where a number of shards is written it falls by as much, so that
    each replica keeps its ranks. Validation rejects what the recipe cannot divide."""
    shard = job.spec.parallelism.shard
    for times in (2, 4, 8):
        if size * times > most:
            return
        larger: Any = {"ranks": size * times} if axis == "pipeline" else size * times
        fields: dict[str, Any] = {f"parallelism.{axis}": larger}
        if isinstance(shard, int) and shard > 1:
            if shard % times:
                continue
            fields["parallelism.shard"] = shard // times
        yield _Change(fields, _RAISED[axis] + 0.1 * times)


def _shard_fields(job: TrainingJob, shard: int) -> dict[str, Any]:
    """The shard size with the fields that follow from it: replicas, and nodes that whole groups
    fill."""
    fields: dict[str, Any] = {"parallelism.shard": shard}
    workers, parallelism = job.spec.workers_per_node, job.spec.parallelism
    if parallelism.replicate != "auto":
        fields["parallelism.replicate"] = "auto"
    if parallelism.ddp:
        fields["parallelism.ddp"] = None
    nodes = math.lcm(shard * parallelism.inner, workers) // workers
    if nodes > job.spec.nodes.min:
        fields["nodes.min"] = nodes
    return fields


def _planned(
    job: TrainingJob, num_nodes: int, memory: WorkerMemory, hardware: Hardware | None
) -> tuple[int, float | None, int] | None:
    """(bytes, seconds of a step, workers) of a job as it would be launched."""
    chosen, work = choose_mesh(job, num_nodes, memory), workload_of(job)
    if chosen is None or work is None:
        return None
    layout = fitted_layout(job, chosen[0], memory.device)
    if layout.offload and not main_memory_holds(work, layout.mesh, memory.host):
        return None
    seconds = step_time(work, layout, hardware).seconds if hardware is not None else None
    return device_bytes(work, layout), seconds, num_nodes_used(job, chosen[0])


def _way(
    job: TrainingJob,
    num_nodes: int,
    memory: WorkerMemory,
    hardware: Hardware | None,
    changes: list[_Change],
    as_it_is: tuple[int, float | None, int] | None,
) -> Way | None:
    fields = {field: value for change in changes for field, value in change.fields.items()}
    changed = job
    for field, value in fields.items():
        changed = with_field(changed, field.split("."), value)
    nodes = fields.get("nodes.max", num_nodes)
    planned = _planned(changed, nodes, memory, hardware)
    assert memory.device is not None
    if planned is None or planned[0] > USABLE * memory.device or not is_valid(changed):
        return None
    ratio = None
    if as_it_is is not None and as_it_is[1] and planned[1]:
        ratio = planned[1] / as_it_is[1]
    return Way(fields, planned[0], ratio, nodes / num_nodes)


def is_valid(job: TrainingJob) -> bool:
    """True if the spec is valid. Asked last, as this takes longer than an estimate."""
    try:
        job_from_mapping(job_to_mapping(job))
    except SpecError:
        return False
    return True


def with_field(part: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a part of a job with one field changed, not validated as a whole."""
    if isinstance(part, TrainingJob):
        path = ("spec", *path)
    attribute = _attribute(part, path[0])
    now = getattr(part, attribute)
    if len(path) > 1:
        new = with_field(now, path[1:], value)
    else:
        kind: Any = type(part).model_fields[attribute].annotation
        new = TypeAdapter(kind).validate_python(value) if isinstance(value, dict) else value
    return part.model_copy(update={attribute: new})


def _attribute(part: Any, alias: str) -> str:
    """The attribute of a field by its name in YAML."""
    fields = type(part).model_fields
    return next(str(name) for name, field in fields.items() if alias in (name, field.alias))


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value)
