"""The story of a job from its journal alone, for those who are not its controller.

Owns: that fold. Must not: read files.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.observe.projection import JobProjection


def replay(
    job: TrainingJob, records: Iterable[Record], start: bytes | None = None
) -> JobProjection:
    """The story after these records, which follow the snapshot `start` (None: they are all)."""
    state, memory = snapshot.decode(start) if start is not None else (None, None)
    controller, story = Controller(state), JobProjection(job, memory, state)
    for now_ns, event in records:
        actions = controller.step(now_ns, event)
        story.observe(now_ns, event, actions, controller.state)
    return story
