"""Hardware of a job's steps, from facts about a node: the same for `spec plan` and for the plan
beside the measurements of a running job."""

from __future__ import annotations

from collections.abc import Iterable

from ..api.v1alpha1 import TrainingJob
from ..catalogue.calibration import CalibrationEntry, key_of, nearest
from ..catalogue.load import Catalogue
from ..planner.workload import ParallelLayout, Workload
from ..protocol.fabric import choose_profile, is_loopback
from ..protocol.facts import NodeFacts
from .cpu import EFFICIENCY, cpu_device
from .step_time import Hardware

NETWORKS = {
    "ib": "infiniband-400",
    "roce": "infiniband-400",
    "efa": "infiniband-400",
    "nvlink-only": "infiniband-400",
    "tcp": "ethernet-100",
}
"""Fabric profile -> link of the catalogue. The rate of an adapter is not known."""


def hardware_of(
    known: Catalogue, job: TrainingJob, facts: NodeFacts, num_nodes: int, network: str = ""
) -> Hardware | None:
    """Hardware of the job's workers on `num_nodes` nodes like this one; None: GPUs that the
    catalogue does not have. `network`: the link between nodes; empty: by the fabric profile, and
    within the machine for a job on CPUs whose nodes are all on it."""
    between = network or NETWORKS[choose_profile(job.spec.fabric, facts, num_nodes)[0]]
    if job.spec.resources.num_gpus:
        device = known.reported(facts.gpus[0].name) if facts.gpus else None
        if device is None:
            return None
        return Hardware(device, known.link(device.link), known.link(between))
    together = not network and is_loopback(facts.address)
    workers = workers_here(job) if together else job.spec.workers_per_node
    cores = facts.cpus
    if job.spec.resources.cpu is not None:
        cores = min(cores, max(1, int(job.spec.resources.cpu)) * workers)
    device = cpu_device(cores, facts.memory_bytes, workers, facts.processor)
    link = known.link(device.link)
    return Hardware(device, link, link if together else known.link(between), efficiency=EFFICIENCY)


def workers_here(job: TrainingJob) -> int:
    """Workers that share a machine if all nodes of the job are on it: of its full size, as their
    number of threads is."""
    return job.spec.workers_per_node * job.spec.nodes.max


def calibrated(
    hardware: Hardware,
    work: Workload,
    layout: ParallelLayout,
    entries: Iterable[CalibrationEntry],
) -> Hardware:
    """The device with the factors of its nearest measurement; as it was if there is none. The
    measured link is that within a machine."""
    calibration = nearest(entries, key_of(work, layout, hardware.device.name))
    if calibration is None:
        return hardware
    link, network = calibration.calibration.link, hardware.network
    if link is None:
        return hardware._replace(calibration=calibration.calibration)
    # Nodes on one machine reach each other as its workers do.
    network = link if network == hardware.node_link else network
    return hardware._replace(calibration=calibration.calibration, node_link=link, network=network)
