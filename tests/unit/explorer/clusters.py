"""Models on devices of the catalogue, for the tests of the search."""

from __future__ import annotations

import functools
from typing import Any

from holdfast.orchestrator.catalogue.load import Catalogue, load_catalogue
from holdfast.orchestrator.explorer.model_plan import cluster_of
from holdfast.orchestrator.explorer.search import Cluster
from holdfast.orchestrator.explorer.step_time import Hardware
from holdfast.orchestrator.planner.model import count_parameters
from holdfast.orchestrator.planner.workload import Workload


@functools.cache
def catalogue() -> Catalogue:
    return load_catalogue()


def hardware(device: str = "H100-80", network: str = "infiniband-400") -> Hardware:
    known = catalogue()
    found = known.device(device)
    return Hardware(found, known.link(found.link), known.link(network))


def cluster(devices: int, device: str = "H100-80", network: str = "infiniband-400") -> Cluster:
    on = hardware(device, network)
    return cluster_of(devices, on.device, on)


def workload(model: str, batch: int = 512, **more: Any) -> Workload:
    architecture = catalogue().architecture(model)
    return Workload(
        model=architecture,
        counts=count_parameters(architecture),
        **{"sequence_length": 8192, "global_batch": batch, "compiled": True, **more},
    )
