"""What the planner predicted of the running mesh, for the view: it stands beside what is measured.

The figures are those that `holdfast plan JOB` shows on such nodes, with the user's measurements of
`plan --calibrate` where the controller's host has them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.catalogue.load import catalogue_or_built_in
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.planner.calibration import CalibrationEntry
from holdfast.orchestrator.planner.hardware import calibrated, hardware_of
from holdfast.orchestrator.planner.memory import CONTEXT_BYTES, device_bytes
from holdfast.orchestrator.planner.step_time import step_time
from holdfast.orchestrator.planner.traffic import collectives
from holdfast.orchestrator.planner.workload import layout_of, workload_of
from holdfast.orchestrator.protocol.facts import NodeFacts
from holdfast.orchestrator.protocol.mesh import Mesh

from .view import PlannedView


class _Asked(NamedTuple):
    """What the figures follow from. A resize changes nodes.max, and nothing else of a job that they
    depend on."""

    mesh: Mesh
    micro_batch: int
    num_nodes: int
    nodes_max: int
    facts: NodeFacts | None


class PlannedFigures:
    """Figures of one job; computed once for each mesh and kind of node. `measured`: entries of the
    user's file of measurements."""

    def __init__(self, job: TrainingJob, measured: Sequence[CalibrationEntry] = ()) -> None:
        self._job, self._measured = job, measured
        self._of = functools.lru_cache(maxsize=8)(self._compute)

    def of(self, state: JobState) -> PlannedView | None:
        """None for scripts and modules, and before the first launch."""
        if state.membership is None or state.mesh is None:
            return None
        if self._job.spec.entrypoint.recipe is None:
            return None
        self._job = state.job
        node = state.nodes.get(state.members[0]) if state.members else None
        nodes = max(1, len(state.members))
        chosen = state.membership.micro_batch
        facts = node.facts if node is not None else None
        return self._of(_Asked(state.mesh, chosen, nodes, state.job.spec.nodes.max, facts))

    def _compute(self, asked: _Asked) -> PlannedView | None:
        work = workload_of(self._job)
        assert work is not None
        layout, hardware = layout_of(self._job, asked.mesh, asked.micro_batch), None
        if asked.facts is not None:
            known = catalogue_or_built_in()
            hardware = hardware_of(known, self._job, asked.facts, asked.num_nodes)
        seconds = None
        if hardware is not None:
            hardware = calibrated(hardware, work, layout, self._measured)
            seconds = step_time(work, layout, hardware).seconds
        # What torch allocates: a CUDA context is no part of what workers measure.
        tensors = device_bytes(work, layout) - (round(CONTEXT_BYTES) if work.on_gpu else 0)
        return PlannedView(
            device_memory_bytes=tensors,
            sent_bytes=round(sum(row.num_bytes for row in collectives(work, layout))),
            step_s=seconds,
        )
