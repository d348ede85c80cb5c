"""The agent's reports to the controller, built from its records. Pure.

Owns: how a record becomes a message. Must not: hold state.
"""

from __future__ import annotations

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard, WorkerBeat

from . import inputs as f
from .generation import Generation, Worker


def exits_again(group: Generation | None) -> list[f.Output]:
    """What a controller may have missed of the generation that runs."""
    if group is None or group.stopped:
        return []
    return [f.Send(exited(group, worker)) for worker in group.workers.values() if worker.exit]


def heartbeat(
    group: Generation | None, beats: tuple[WorkerBeat, ...], staged_step: int
) -> f.Output:
    generation = group.generation if group and not group.stopped else 0
    beat = m.Heartbeat(generation=generation, workers=beats, staged_step=staged_step)
    return f.Send(beat)


def launched(action_id: int, generation: int, *, ok: bool, detail: str = "") -> f.Output:
    return f.Send(m.Launched(action_id=action_id, generation=generation, ok=ok, detail=detail))


def exited(group: Generation, worker: Worker) -> m.WorkerExitReport:
    assert worker.exit is not None
    return m.WorkerExitReport(generation=group.generation, exit=worker.exit)


def stopped(
    action_id: int,
    generation: int,
    group: Generation | None,
    staged: tuple[StagedShard, ...],
    offered_port: int,
) -> f.Output:
    """Nothing of the generation runs here any more; `group` is None when it never did."""
    message = m.Stopped(
        action_id=action_id,
        generation=generation,
        exits=group.exits if group else (),
        staged=staged,
        stacks=group.stop.stacks if group and group.stop else (),
        offered_port=offered_port,
    )
    return f.Send(message)


def staged(action_id: int, detail: str) -> f.Output:
    """Result of Stage; `detail`: why not, empty when all workers have."""
    return f.Send(m.ShardStaged(action_id=action_id, ok=not detail, detail=detail))


def cannot_persist(message: m.Persist, detail: str) -> m.ShardPersistFailed:
    return m.ShardPersistFailed(
        generation=message.generation, step=message.step, shard=-1, detail=detail, tried=False
    )
