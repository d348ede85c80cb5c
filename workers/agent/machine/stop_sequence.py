"""How the workers of a generation are ended: stacks, SIGTERM, grace, SIGKILL, or a rehearsed
failure. Pure.

Owns: the order. Must not: report; the machine does when the last worker is reaped.
"""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m

from . import inputs as f
from .generation import NS, SIGKILL, SIGSTOP, SIGTERM, Generation, Stopping, Worker

STACK_MARGIN_S = 0.5
"""Past limits.STACK_TIMEOUT_S, what takes the stacks is itself stuck: kill without them."""


def begin(now_ns: int, group: Generation, message: m.StopWorkers) -> list[f.Output]:
    """The first Stop of a generation."""
    stop = group.stop = Stopping([message.action_id], message.grace_s)
    if not (message.stacks and group.alive):
        return carry_on(now_ns, group, stop)
    stop.stage = "stacks"
    stop.deadline_ns = now_ns + int((limits.STACK_TIMEOUT_S + STACK_MARGIN_S) * NS)
    return [f.TakeStacks(group.generation, tuple(worker.seat.rank for worker in group.alive))]


def again(now_ns: int, stop: Stopping, message: m.StopWorkers) -> None:
    """One more Stop: it gets its own answer, and may shorten the grace."""
    if message.action_id not in stop.action_ids:
        stop.action_ids.append(message.action_id)
    if message.grace_s < stop.grace_s:
        stop.grace_s = message.grace_s
        if stop.stage == "term":
            stop.deadline_ns = now_ns + int(message.grace_s * NS)


def carry_on(now_ns: int, group: Generation, stop: Stopping) -> list[f.Output]:
    """begin or stacks -> term -> kill; without grace straight to kill."""
    if stop.grace_s <= 0 or stop.stage == "term":
        return kill_all(group)
    stop.stage, stop.deadline_ns = "term", now_ns + int(stop.grace_s * NS)
    return [_signal(group, worker, SIGTERM) for worker in group.alive]


def kill_all(group: Generation) -> list[f.Output]:
    if group.stop is None:
        group.stop = Stopping([], 0.0)
    group.stop.stage, group.stop.deadline_ns = "kill", None
    return [_signal(group, worker, SIGKILL) for worker in group.alive]


def rehearse(group: Generation | None, message: m.Chaos) -> list[f.Output]:
    """A failure that a person asked for."""
    if message.kind == "kill-node":
        return [f.KillNode()]
    signal = {"kill-worker": SIGKILL, "hang-worker": SIGSTOP}.get(message.kind)
    worker = group.workers.get(message.rank) if group else None
    if signal is None or group is None or worker is None or worker.ended:
        text = f"chaos {message.kind}: there is no live worker of rank {message.rank} here"
        return [f.Send(m.AgentEvent(text=text))]
    # Not in worker.signals: the exit must look as if somebody else had done it.
    return [f.Kill(group.generation, message.rank, signal)]


def _signal(group: Generation, worker: Worker, signal: int) -> f.Output:
    worker.signals.add(signal)
    return f.Kill(group.generation, worker.seat.rank, signal)
