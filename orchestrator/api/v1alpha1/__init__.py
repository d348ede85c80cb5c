"""TrainingJob: the one definition of what a user asks for."""

from .job import API_VERSION, KIND, JobSpec, TrainingJob
from .kubernetes import Kubernetes
from .load import job_from_mapping, job_to_mapping, load_job, parse_job
from .ray import Ray
from .recipe import Pretrain, Recipe
from .resilience import Budget, Budgets, Checkpoint, Recovery
from .workload import Entrypoint, Fabric, Nodes, Parallelism, Precision, Resources

__all__ = [
    "API_VERSION", "KIND", "Budget", "Budgets", "Checkpoint", "Entrypoint", "Fabric", "JobSpec",
    "Kubernetes", "Nodes", "Parallelism", "Precision", "Pretrain", "Ray", "Recipe", "Recovery",
    "Resources", "TrainingJob", "job_from_mapping", "job_to_mapping", "load_job", "parse_job",
]  # fmt: skip
