"""What a user should know about a valid spec: fields that do something else than is likely meant.
Every command that reads a spec prints them; nothing is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from .job import TrainingJob


def remarks(job: TrainingJob) -> list[str]:
    return list(_gpus(job))


def _gpus(job: TrainingJob) -> Iterator[str]:
    count, workers = job.spec.resources.num_gpus, job.spec.workers_per_node
    if count > 1:
        yield (
            f"spec.resources.gpu: {count} GPUs for each worker, {count * workers} for a node; the "
            f"script has to use all {count}. For one worker on each GPU write workersPerNode: "
            f"{count * workers} and gpu: 1"
        )
