"""Reason why a job certainly runs out of memory, before anything is launched."""

from __future__ import annotations

from ..api.v1alpha1 import TrainingJob
from ..errors import Problem
from ..parts import part
from ..protocol.mesh import Mesh
from .choose import choose_mesh, may_fit
from .memory import (
    MAIN_MEMORY_PER_DEVICE,
    USABLE,
    WorkerMemory,
    device_bytes,
    main_memory_holds,
    model_state_bytes,
    whole_share,
)
from .micro_batch import fitted_layout
from .workload import workload_of


def refusal(job: TrainingJob, num_nodes: int, mesh: Mesh, memory: WorkerMemory) -> Problem | None:
    """Reason why a job certainly runs out of memory on this mesh, with the changes that help; None:
    it may fit, or it is not known."""
    if may_fit(job, mesh, memory):
        return None
    work, layout = workload_of(job), fitted_layout(job, mesh, memory.device)
    assert work is not None
    field, got, states = "spec.parallelism", mesh.describe(), model_state_bytes(work, layout)
    if memory.device is None:  # a job on CPUs
        assert memory.host is not None
        room, where = whole_share(memory.host), "a worker's share of its node's main memory"
        got += f": weights, gradients and optimizer of a worker take {states / 2**30:.1f} GiB"
        expected = f"at most {room / 2**30:.1f} GiB, {where}"
    elif layout.offload and not main_memory_holds(work, mesh, memory.host):
        room = MAIN_MEMORY_PER_DEVICE if memory.host is None else memory.host
        got = f"cpu with {got}: {states / 2**30:.1f} GiB of states per worker by estimate"
        field, expected = f"{field}.offload", f"at most {room / 2**30:.1f} GiB of main memory"
    else:
        needs = device_bytes(work, layout) / 2**30
        got += f", which needs {needs:.1f} GiB per worker by estimate"
        expected = f"at most {USABLE:.0%} of {memory.device / 2**30:.1f} GiB"
    fix = part("fix") or (lambda *_: "use more nodes, or larger devices")
    return Problem(field, got, expected, fix(job, num_nodes, memory))


def refused_as_wanted(job: TrainingJob, memory: WorkerMemory) -> Problem | None:
    """`refusal` of a job with all nodes that it wants, on nodes that have this."""
    chosen = choose_mesh(job, job.spec.nodes.max, memory)
    return chosen and refusal(job, job.spec.nodes.max, chosen[0], memory)
