"""Models, clusters and layouts of the founding documents, as the planner takes them."""

from __future__ import annotations

from functools import cache
from typing import Any

from holdfast.orchestrator.api.v1alpha1.parallelism import ActivationCheckpointing
from holdfast.orchestrator.catalogue.load import load_catalogue, parse_devices
from holdfast.orchestrator.catalogue.types import Device
from holdfast.orchestrator.explorer.model_plan import ModelPlan, cluster_of, plan_model
from holdfast.orchestrator.explorer.search import Cluster
from holdfast.orchestrator.explorer.step_time import Hardware
from holdfast.orchestrator.planner.memory import device_bytes, device_terms, model_state_bytes
from holdfast.orchestrator.planner.model import Counts, count_parameters
from holdfast.orchestrator.planner.terms import by_phase
from holdfast.orchestrator.planner.workload import ParallelLayout, Workload
from holdfast.orchestrator.protocol.mesh import Mesh

GB = 1e9
"""The documents count in powers of ten."""
CATALOGUE = load_catalogue()
NETWORK = "infiniband-400"
SEQUENCE = 4096
BATCH = 1024
"""Samples of a step: 4 Mi tokens."""
FULL = ActivationCheckpointing.model_validate({"full": {}})
LEAST: dict[str, Any] = {"checkpointing": FULL, "chunk_tokens": 2048}
"""Settings with which a layout needs least memory of the device without offload."""


def work(name: str, sequence: int = SEQUENCE, batch: int = BATCH, **changed: Any) -> Workload:
    """A model of the catalogue."""
    model = CATALOGUE.architecture(name)
    return Workload(
        model=model, counts=count_parameters(model), sequence_length=sequence,
        global_batch=batch, compiled=True, **changed,
    )  # fmt: skip


def nominal(billions: float, **changed: Any) -> Workload:
    """A model with exactly so many parameters, in one block: for states and traffic only."""
    number = round(billions * 1e9)
    counts = Counts(embedding=0, layer=number, head=0, num_layers=1, matrices=number)
    return Workload(
        model=CATALOGUE.architecture("llama3-70b"), counts=counts, sequence_length=SEQUENCE,
        global_batch=BATCH, **changed,
    )  # fmt: skip


def device(name: str) -> Device:
    return CATALOGUE.device(name)


def hardware(name: str) -> Hardware:
    one = device(name)
    return Hardware(one, CATALOGUE.link(one.link), CATALOGUE.link(NETWORK))


def cluster(text: str) -> Cluster:
    """The cluster of "64xH100-80"."""
    number, one = parse_devices(text, CATALOGUE)
    return cluster_of(number, one, hardware(one.name))


def layout(
    shard: int, replicate: int = 1, *, tensor: int = 1, context: int = 1, pipeline: int = 1,
    micro_batch: int = 1, num_micro_batches: int = 1, **settings: Any,
) -> ParallelLayout:  # fmt: skip
    """The layout of nodes with eight devices."""
    return ParallelLayout(
        mesh=Mesh(replicate, shard, tensor, context, pipeline), workers_per_node=8,
        micro_batch=micro_batch, num_micro_batches=num_micro_batches, **settings,
    )  # fmt: skip


def states_gb(job: Workload, shard: int, replicate: int = 1) -> float:
    """Master copy, gradients and moments of one rank."""
    return model_state_bytes(job, layout(shard, replicate)) / GB


def kept_gb(job: Workload, one: ParallelLayout) -> float:
    """States and what strategies of ZeRO keep beside them: parameters and gradients whole."""
    kept = ("master", "moments", "gradients", "weights")
    return max(by_phase(term for term in device_terms(job, one) if term.category in kept)) / GB


def peak_gb(job: Workload, one: ParallelLayout) -> float:
    return device_bytes(job, one) / GB


def category_gb(job: Workload, one: ParallelLayout, category: str) -> float:
    """Peak over the phases of one category."""
    terms = [term for term in device_terms(job, one) if term.category == category]
    return max(by_phase(terms)) / GB


@cache
def planned(name: str, devices: str, sequence: int = SEQUENCE, batch: int = BATCH) -> ModelPlan:
    """The answer of `holdfast spec plan --model NAME --devices DEVICES`."""
    return plan_model(work(name, sequence, batch), (cluster(devices),))
