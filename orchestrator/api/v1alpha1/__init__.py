"""TrainingJob, version v1alpha1: models, reading and writing, JSON schema, CRD, reference page."""

from .backends import Kubernetes, Ray
from .job import API_VERSION, KIND, JobSpec, TrainingJob
from .load import job_from_mapping, job_to_mapping, load_job, parse_job, yaml_text
from .parallelism import Parallelism, Precision
from .recipe import Pretrain, Recipe
from .resilience import Budget, Budgets, Checkpoint, Recovery
from .workload import Entrypoint, Fabric, Nodes, Resources

__all__ = [
    "API_VERSION", "KIND", "Budget", "Budgets", "Checkpoint", "Entrypoint", "Fabric", "JobSpec",
    "Kubernetes", "Nodes", "Parallelism", "Precision", "Pretrain", "Ray", "Recipe", "Recovery",
    "Resources", "TrainingJob", "job_from_mapping", "job_to_mapping", "load_job", "parse_job",
    "yaml_text",
]  # fmt: skip
