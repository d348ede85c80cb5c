"""The agent's reports to the controller, built from its records. Pure.

Owns: how a record becomes a message. Must not: hold state.
"""

from __future__ import annotations

from orchestrator.protocol import messages as m
from orchestrator.protocol.facts import StagedShard

from . import facts as f
from .group import Group, Worker


def launched(action_id: int, generation: int, *, ok: bool, detail: str = "") -> f.Output:
    return f.Send(m.Launched(action_id=action_id, generation=generation, ok=ok, detail=detail))


def exited(group: Group, worker: Worker) -> m.WorkerExited:
    assert worker.exit is not None
    return m.WorkerExited(generation=group.generation, exit=worker.exit)


def stopped(
    action_id: int,
    generation: int,
    group: Group | None,
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


def cannot_persist(message: m.Persist, detail: str) -> m.PersistFailed:
    return m.PersistFailed(
        generation=message.generation, step=message.step, shard=-1, detail=detail, tried=False
    )
