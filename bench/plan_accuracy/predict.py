"""Predictions of the planner in the terms of a measurement. Only this file knows the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.explorer.traffic import collectives
from holdfast.orchestrator.planner.memory import device_terms, model_state_bytes
from holdfast.orchestrator.planner.terms import PHASES, by_phase
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.mesh import Mesh


@dataclass(frozen=True)
class Predicted:
    """Memory of one rank, in bytes."""

    peak: int
    """Peak of tensors on the device, without the CUDA context."""
    phases: dict[str, float]
    """The same in each phase of the planner."""
    states: int
    """Weights, gradients and optimizer state, wherever they are."""
    sent: float
    """Per step."""
    terms: dict[str, float]
    traffic: dict[str, float]


def predict(job: TrainingJob, mesh: Mesh) -> Predicted:
    work, layout = workload_of(job), layout_of(job, mesh)
    assert work is not None
    terms = [term for term in device_terms(work, layout) if term.category != "context"]
    phases = dict(zip(PHASES, by_phase(terms), strict=True))
    # The tracer sees operators, and not that gloo sends a reduce-scatter as an all-reduce.
    traffic = collectives(msgspec.structs.replace(work, on_gpu=True), layout)
    return Predicted(
        peak=math.ceil(max(phases.values())),
        phases=phases,
        states=model_state_bytes(work, layout),
        sent=sum(one.num_bytes for one in traffic),
        terms={f"{term.category}: {term.what}": term.num_bytes for term in terms},
        traffic={f"{one.what} ({one.group})": one.num_bytes for one in traffic},
    )
