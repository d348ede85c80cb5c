"""Jobs for the planner's tests."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.planner.memory import device_terms
from holdfast.orchestrator.planner.terms import Term
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload, layout_of, workload_of
from holdfast.orchestrator.protocol.facts import NodeFacts
from holdfast.orchestrator.protocol.mesh import Mesh
from tests.documents import job_document


def make_job(
    *, nodes: tuple[int, int] = (1, 2), workers: int = 2, recipe: Any = None, **spec: Any
) -> TrainingJob:
    """A job on `nodes` = (min, max); a script, or the pre-training recipe with these settings."""
    entrypoint: Any = {"script": "train.py"}
    if recipe is not None:
        entrypoint = {"recipe": {"name": "pretrain", "config": recipe}}
    return job_from_mapping(
        job_document(
            "demo",
            {
                "entrypoint": entrypoint,
                "nodes": {"min": nodes[0], "max": nodes[1]},
                "workersPerNode": workers,
                **spec,
            },
        )
    )


FACTS = NodeFacts(hostname="a", address="127.0.0.1", data_port=1, slots=8, cpus=8)


def planned(job: TrainingJob, mesh: Mesh) -> tuple[Workload, ParallelLayout]:
    """Arguments of the estimates for a recipe's job."""
    work = workload_of(job)
    assert work is not None
    return work, layout_of(job, mesh)


def device_rows(job: TrainingJob, mesh: Mesh) -> dict[str, Term]:
    """Terms of a rank's device by what they are; of two with the same name the last."""
    return {term.what: term for term in device_terms(*planned(job, mesh))}
