"""Decides spec.resources.gpu where it is `auto`: once, when the job is submitted, from what the
backend has found. The number is journaled with the spec and never changes afterwards."""

from __future__ import annotations

from typing import NamedTuple

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.effects import without_effect
from ..errors import Problem, SpecError
from ..protocol.environment import VISIBLE_DEVICES

FIELD = "spec.resources.gpu"


class GpusFound(NamedTuple):
    """The GPUs of the nodes on which a job could run."""

    most: int
    """GPUs of the node that has most."""
    what: str
    """A sentence's end: where they were looked for and what was found there."""
    wanted: bool = False
    """The job asks for GPUs in other words, such as spec.ray.acceleratorType."""


class TooFewGpus(SpecError):
    """Nodes have GPUs, but not one for each of their workers."""


class Resolved(NamedTuple):
    job: TrainingJob
    why: str
    """One sentence; empty: the spec has the number itself."""


def is_auto(job: TrainingJob) -> bool:
    return job.spec.resources.gpu == "auto"


def with_gpus(job: TrainingJob, gpu: int) -> TrainingJob:
    """The job with this number where the spec has `auto`."""
    if not is_auto(job):
        return job
    resources = job.spec.resources.model_copy(update={"gpu": gpu})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"resources": resources})})


def resolve(job: TrainingJob, found: GpusFound) -> Resolved:
    """One GPU for each worker where a node has that many, none where no node has a GPU. Raises
    TooFewGpus where nodes have too few, as neither answer would be what the user expects, and
    SpecError for fields that the number leaves without effect."""
    if not is_auto(job):
        return Resolved(job, "")
    workers = job.spec.workers_per_node
    if job.spec.env.get(VISIBLE_DEVICES) == "":
        count, why = 0, f"spec.env.{VISIBLE_DEVICES} is empty"
    elif found.wanted or found.most >= workers:
        count, why = 1, found.what
    elif found.most == 0:
        count, why = 0, found.what
    else:
        expected = f"0, or a node with {workers} GPUs, one for each of workersPerNode"
        fix = f"write gpu: 0 to train on the CPU, or workersPerNode: {found.most}"
        raise TooFewGpus([Problem(FIELD, f"auto ({found.what})", expected, fix)])
    each = "each worker gets one GPU" if count else "workers train on the CPU"
    resolved = with_gpus(job, count)
    if problems := without_effect(resolved):
        raise SpecError(problems)
    return Resolved(resolved, f"{FIELD} auto: {each}; {why}")
