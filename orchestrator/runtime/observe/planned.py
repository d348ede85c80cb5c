"""The planner's predictions for the running mesh: the view has them beside the measurements.

The figures are those that `spec plan JOB` shows on such nodes, with the user's measurements of
`plan --calibrate` where the controller's host has them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.recipe import pretraining
from holdfast.orchestrator.catalogue.calibration import CalibrationEntry
from holdfast.orchestrator.catalogue.load import catalogue_or_built_in
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.explorer.hardware import calibrated, hardware_of
from holdfast.orchestrator.explorer.step_time import step_time
from holdfast.orchestrator.explorer.traffic import collectives
from holdfast.orchestrator.planner.memory import CONTEXT_BYTES, device_bytes, peak_by_category
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.facts import NodeFacts
from holdfast.orchestrator.protocol.mesh import Mesh

from .view import PlannedView


class PlannedFigures:
    """Figures of one job; computed once for each mesh and kind of node. `measured`: entries of the
    user's file of measurements."""

    def __init__(self, job: TrainingJob, measured: Sequence[CalibrationEntry] = ()) -> None:
        self._job, self._measured = job, measured
        self._of = functools.lru_cache(maxsize=8)(self._compute)

    def of(self, state: JobState) -> PlannedView | None:
        """None for all but the recipe pretrain, and before the first launch."""
        membership, self._job = state.group.membership, state.job
        planned = pretraining(self._job.spec.entrypoint.recipe)
        if membership is None or state.mesh is None or planned is None:
            return None
        node = state.nodes.get(state.group.members[0]) if state.group.members else None
        return self._of(
            state.mesh,
            membership.micro_batch,
            max(1, len(state.group.members)),
            self._job.spec.nodes.max,
            node and node.facts,
        )

    def peak(self, state: JobState) -> float:
        """FLOP/s of one worker's device in bfloat16, or in float16 where it has no bfloat16; 0: the
        device is not in the catalogue, so its job has no MFU."""
        node = state.nodes.get(state.group.members[0]) if state.group.members else None
        if node is None or not node.facts.gpus:
            return 0.0
        device = catalogue_or_built_in().reported(node.facts.gpus[0].name)
        return device.flops.get("bfloat16") or device.flops.get("float16", 0.0) if device else 0.0

    def _compute(
        self, mesh: Mesh, micro_batch: int, num_nodes: int, _max: int, facts: NodeFacts | None
    ) -> PlannedView:
        """A resize changes nodes.max, and nothing else of the job that the figures follow from."""
        work = workload_of(self._job)
        assert work is not None
        layout, hardware = layout_of(self._job, mesh, micro_batch), None
        if facts is not None:
            hardware = hardware_of(catalogue_or_built_in(), self._job, facts, num_nodes)
        seconds = None
        if hardware is not None:
            timed = calibrated(hardware, work, layout, self._measured)
            seconds = step_time(work, layout, timed).seconds
        # What torch allocates: a CUDA context is no part of what workers measure.
        tensors = device_bytes(work, layout) - (round(CONTEXT_BYTES) if work.on_gpu else 0)
        return PlannedView(
            device_memory_bytes=tensors,
            sent_bytes=round(sum(row.num_bytes for row in collectives(work, layout))),
            step_s=seconds,
            categories={str(name): n for name, n in peak_by_category(work, layout).items()},
        )
