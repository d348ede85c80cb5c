"""Plan of this node's memory, from what is measured when its workers ask for buffers."""

from __future__ import annotations

from holdfast.orchestrator.protocol.host_memory import HostMemory, HostRoom, plan_host_memory

from . import inputs
from .generation import Generation


class MemoryPlan:
    """The plan of the running generation. Without a measurement nothing is limited."""

    def __init__(self) -> None:
        self.current: HostMemory | None = None
        self._measured: inputs.MemoryMeasured | None = None
        self._reported: HostMemory | None = None

    def launch(self) -> None:
        self.current = None

    def measured(self, given: inputs.MemoryMeasured) -> None:
        self._measured = given

    def plan(self, group: Generation, num_bytes: int, slots: int) -> HostMemory | None:
        """Plan for buffers of this size; workers of one slot share them. Within a generation a node
        only gets less: what is given cannot be taken back, and what others may still take is not
        known before they ask."""
        measured, before = self._measured, self.current
        if measured is None:
            return None
        sharing = max(1, group.launch.nodes_on_machine)
        free = measured.available_bytes // sharing + measured.held_bytes
        planned = plan_host_memory(
            HostRoom(measured.limit_bytes // sharing, free, measured.on_cpu),
            shard_bytes=max(num_bytes, before.shard_bytes if before else 0),
            num_shards=group.membership.mesh.num_shards,
            workers=len(group.workers),
            shards=slots,
            buddy=bool(group.launch.buddy) and (before is None or before.grant.buddy),
        )
        if before is None or _rank(planned) < _rank(before):
            self.current = planned
        return self.current

    def unreported(self) -> HostMemory | None:
        """The plan, if it differs from the last one that was reported in more than what is free."""
        if self.current is None or _facts(self.current) == _facts(self._reported):
            return None
        self._reported = self.current
        return self.current


def _rank(memory: HostMemory) -> tuple[bool, int]:
    return memory.grant.buddy, memory.grant.buffers


def _facts(memory: HostMemory | None) -> tuple[object, ...] | None:
    if memory is None:
        return None
    return (
        memory.grant, memory.shard_bytes, memory.num_shards, memory.workers, memory.shards
    )  # fmt: skip
