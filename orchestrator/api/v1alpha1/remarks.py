"""Remarks on a valid spec: fields that do something else than is likely meant. Every command that
takes a spec prints them, and the operator records Events; nothing is rejected."""

from __future__ import annotations

from collections.abc import Iterator

from . import variables
from .job import TrainingJob
from .recipe import Finetune


def remarks(job: TrainingJob) -> list[str]:
    resources = job.spec.resources
    num_gpus = None if resources.gpu == "auto" else resources.num_gpus
    others = [*_command(job), *_gpus(job), *_rate(job)]
    return [*others, *variables.remarks(job.spec.env, num_gpus)]


def _rate(job: TrainingJob) -> Iterator[str]:
    """NUM402 and NUM403 of preflight, for a recipe."""
    recipe = job.spec.entrypoint.recipe
    if recipe is None or not isinstance(config := recipe.config, Finetune):
        return
    warmup, steps = config.optimizer.warmup_steps, config.total_steps
    if steps and warmup >= steps:
        yield (
            f"spec.entrypoint.recipe.config.optimizer.warmupSteps: {warmup} with steps: {steps}; "
            "learningRate is not reached; usual is a twentieth of the steps"
        )
    rate, full = config.optimizer.learning_rate, config.method == "full"
    if rate > 1e-4 if full else rate <= 1e-5:
        yield (
            f"spec.entrypoint.recipe.config.optimizer.learningRate: {rate:g} with method "
            f"{config.method}; usual are {'1e-6 to 2e-5' if full else '1e-4 to 3e-4'}"
        )


def _command(job: TrainingJob) -> Iterator[str]:
    program = job.spec.entrypoint.program
    if program.launcher:
        yield (
            f"spec.entrypoint: {program.launcher} is not started; each worker runs "
            f"{program}, and Holdfast gives ranks and addresses, restarts workers and keeps logs"
        )
    has_number = "--config-file" in program.launcher_args
    if program.counts and job.spec.workers_per_node == 1 and not has_number:
        yield (
            f"spec.workersPerNode: 1, where {program.counts} would start a worker on each GPU of a "
            f"machine; write their number if a node has more than one"
        )
    if program.replaced:
        options = ", ".join(program.replaced)
        yield f"spec.entrypoint: {options}: not used; the spec and Holdfast decide this"
    if program.words:
        yield f"spec.entrypoint.command: each rank runs {program}: it is not a Python file"


def _gpus(job: TrainingJob) -> Iterator[str]:
    count, workers = job.spec.resources.num_gpus, job.spec.workers_per_node
    if count > 1:
        yield (
            f"spec.resources.gpu: {count} GPUs for each worker, {count * workers} for a node; the "
            f"script has to use all {count}. For one worker on each GPU write workersPerNode: "
            f"{count * workers} and gpu: 1"
        )
