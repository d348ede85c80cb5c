"""Fields that the models accept and that would have no effect, or another one than they promise.

Checked when a job is submitted. A job that runs already keeps its spec: its journal holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.orchestrator.errors import Problem

from .job import TrainingJob
from .parallelism import Parallelism

PREFIX = "spec.parallelism."
RECIPE_ONLY = ("precision", "activation_checkpointing", "offload", "reshard_after_forward")


def without_effect(job: TrainingJob) -> list[Problem]:
    """Every such field with the fix."""
    recipe = job.spec.entrypoint.recipe
    found = list(_of_a_script(job) if recipe is None else _of_a_recipe(job))
    if job.spec.recovery.gpu_standbys and job.spec.resources.gpu not in ("auto", 1):
        got = f"true with resources.gpu {job.spec.resources.gpu}"
        fix = "set spec.resources.gpu: 1, or remove the field"
        found.append(Problem("spec.recovery.gpuStandbys", got, "it with one GPU per worker", fix))
    if job.spec.ray.accelerator_type is not None and job.spec.resources.gpu == 0:
        got = f"{job.spec.ray.accelerator_type} for a job on CPUs"
        fix = "spec.resources.gpu: 1, or remove the field"
        found.append(Problem("spec.ray.acceleratorType", got, "it for a job on GPUs", fix))
    return found


def _of_a_script(job: TrainingJob) -> Iterator[Problem]:
    for name in RECIPE_ONLY:
        field = Parallelism.model_fields[name]
        value = getattr(job.spec.parallelism, name)
        if value != field.default:
            yield Problem(
                PREFIX + (field.alias or name),
                "a value for a script or module",
                "it for a recipe only",
                "your own loop decides this, where it calls fully_shard or torch.autocast; remove "
                "the field",
            )


def _of_a_recipe(job: TrainingJob) -> Iterator[Problem]:
    spec, mesh = job.spec, job.spec.parallelism
    one_copy = mesh.shard == 1 or spec.nodes.max * spec.workers_per_node == 1
    if mesh.offload == "cpu" and spec.resources.gpu == 0:
        yield Problem(
            f"{PREFIX}offload",
            "cpu for a job on CPUs",
            "none",
            "everything is in main memory already",
        )
    elif mesh.offload == "cpu" and one_copy:
        yield Problem(
            f"{PREFIX}offload",
            "cpu with shard 1",
            "none, or a shard above 1",
            "DDP keeps all states on the device",
        )
    if mesh.precision.reduce == "bfloat16" and one_copy:
        yield Problem(
            f"{PREFIX}precision.reduce",
            "bfloat16 with shard 1",
            "float32, or a shard above 1",
            "DDP reduces gradients in their own format",
        )
    if mesh.precision.parameters == "float16":
        yield Problem(
            f"{PREFIX}precision.parameters",
            "float16",
            "bfloat16, float32 or auto",
            "the recipe does not scale the loss, so small gradients would vanish",
        )
