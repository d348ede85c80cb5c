"""Support of torchtitan 0.3: one argument, and no line in its code or configuration:

    -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports holdfast.torchtitan.in_memory

`in_memory` keeps the trainer's state in the memory of the nodes; `report` only reports steps,
evaluations and saves, and saves before a planned stop. In a config function they are functions:
`config.checkpoint = in_memory(config.checkpoint)`. Outside Holdfast nothing is kept or reported.
See docs/user/frameworks.md.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import override
from torchtitan.config.override import derive

from holdfast.orchestrator.errors import UserError
from holdfast.workers.integrations.torchtitan import (
    DATA_ROOM_BYTES,
    InMemoryCheckpoints,
    ReportedCheckpoints,
)

__all__ = ["in_memory", "report"]


@override(target=CheckpointManager.Config, description="reports to Holdfast")  # type: ignore[untyped-decorator]
def report(config: Any) -> Any:
    """The configuration of a checkpoint manager that reports to Holdfast. Raises UserError for a
    manager other than torchtitan's own."""
    return derive(_expected("report", config), ReportedCheckpoints.Config)


@override(target=CheckpointManager.Config, description="state in the nodes' memory")  # type: ignore[untyped-decorator]
def in_memory(config: Any, *, data_room_bytes: int = DATA_ROOM_BYTES) -> Any:
    """The same, with the trainer's state in the memory of the nodes. `data_room_bytes`: the largest
    state of a rank's data loader. Raises UserError for a manager other than torchtitan's own."""
    source = _expected("in_memory", config)
    return derive(source, InMemoryCheckpoints.Config, data_room_bytes=data_room_bytes)


def _expected(name: str, config: Any) -> Any:
    if type(config) is not CheckpointManager.Config:
        kind = type(config)
        raise UserError(
            f"holdfast.torchtitan.{name}: got {kind.__module__}.{kind.__qualname__}; expected "
            "torchtitan's CheckpointManager.Config, once; leave a manager of your own as it is and "
            "report with session.report"
        )
    return config
