"""One step that all ranks stage whatever their cadence, before a planned end say. Pure.

Owns: the order, and when it is answered. Must not: end anything; the controller's Stop follows.
"""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.workers import worker_protocol

from . import inputs as f
from . import outbound
from .checkpoint_tiers import CheckpointTiers
from .generation import Generation, Worker


def begin(group: Generation | None, message: m.Stage) -> list[f.Output]:
    """Pass the order on to all workers."""
    if group is None or group.stop is not None:
        detail = f"generation {message.generation} does not run here"
        return [outbound.staged(message.action_id, detail)] if message.action_id else []
    if message.action_id:
        group.order = message
    told = worker_protocol.StageAt(step=message.step, hold=message.hold)
    return [f.ToRank(group.generation, worker.seat.rank, told) for worker in group.alive]


def settle(group: Generation | None, tiers: CheckpointTiers) -> list[f.Output]:
    """Answer the order as soon as all workers have obeyed it, or one of them cannot any more."""
    if group is None or group.order is None:
        return []
    order = group.order
    missed = [w.seat.rank for w in group.workers.values() if _missed(w, order, tiers)]
    if group.stop is not None:
        detail = "it was stopped before"
    elif (group.generation, order.step) in tiers.buffers.complete():
        detail = ""
    elif missed:
        detail = f"rank {missed[0]} was past step {order.step}, or at its end"
    else:
        return []
    group.order = None
    return [outbound.staged(order.action_id, detail)]


def _missed(worker: Worker, order: m.Stage, tiers: CheckpointTiers) -> bool:
    """It will not stage that step any more. What it stages is heard of before the step's end is."""
    if worker.ended or worker.finished or worker.step > order.step:
        return True
    slot = tiers.buffers.slots.get(worker.seat.local_rank)
    staged = slot is not None and slot.latest == (order.generation, order.step)
    return worker.step == order.step and not staged
