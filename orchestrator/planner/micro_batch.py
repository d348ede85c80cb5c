"""Micro-batch of `microBatch: auto`, and the layout of a job with it: one decision for plan, launch
and resize, which workers get with their launch.

Without known memory it is that of RecipeConfig.samples_per_pass. With known memory the share of a
rank is divided into as few passes as fit; the global batch stays the same.
"""

from __future__ import annotations

import bisect

from ..api.v1alpha1 import TrainingJob
from ..api.v1alpha1.recipe import pretraining
from ..protocol.mesh import Mesh
from .memory import USABLE, device_bytes
from .workload import ParallelLayout, Workload, layout_of, share_of, workload_of


def fitted_layout(job: TrainingJob, mesh: Mesh, memory_bytes: int | None) -> ParallelLayout:
    """Division of the job's recipe over the ranks of this mesh; `None` as memory: not known. If no
    micro-batch fits, the one that needs least. Raises ValueError without a recipe."""
    whole, work = layout_of(job, mesh), workload_of(job)
    if memory_bytes is None or work is None or not follows_memory(job, mesh):
        return whole
    room = USABLE * memory_bytes
    if whole.micro_batch == 1 or device_bytes(work, whole) <= room:
        return whole
    share = share_of(job, mesh)
    single = layout_of(job, mesh, 1)
    if device_bytes(work, single) > room:
        return min(whole, single, key=lambda one: device_bytes(work, one))

    def fits_in(passes: int) -> bool:
        return device_bytes(work, layout_of(job, mesh, -(-share // passes))) <= room

    passes = range(2, share + 1)
    number = bisect.bisect_left(passes, True, key=fits_in)
    return layout_of(job, mesh, -(-share // passes[number]))


def follows_memory(job: TrainingJob, mesh: Mesh) -> bool:
    """True if the micro-batch is chosen by memory. A pipeline has one sample anyway; with a static
    graph and with steps in backward there is one pass only."""
    config = pretraining(job.spec.entrypoint.recipe)
    if config is None or config.micro_batch != "auto" or mesh.pipeline > 1:
        return False
    return not (job.spec.parallelism.ddp_settings.static_graph or config.optimizer.in_backward)


def chosen_micro_batch(job: TrainingJob, mesh: Mesh, memory_bytes: int | None) -> int:
    """The micro-batch for the workers of a launch; 0: nothing was chosen by memory."""
    if memory_bytes is None or not follows_memory(job, mesh):
        return 0
    return fitted_layout(job, mesh, memory_bytes).micro_batch


def describe(job: TrainingJob, layout: ParallelLayout, work: Workload) -> str:
    """Reason for a micro-batch below a rank's share; empty: it is not, or the spec has it."""
    share = share_of(job, layout.mesh)
    if not follows_memory(job, layout.mesh) or layout.micro_batch == share:
        return ""
    needs = device_bytes(work, layout_of(job, layout.mesh, share)) / 2**30
    return f"microBatch auto: all {share} samples of a rank at once would need {needs:.1f} GiB"
