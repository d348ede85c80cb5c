"""How the workers of a generation are ended: stacks, SIGTERM, grace, SIGKILL. Pure.

Owns: the order. Must not: report; the machine does when the last worker is reaped.
"""

from __future__ import annotations

from orchestrator.protocol import limits
from orchestrator.protocol import messages as m

from . import facts as f
from .group import NS, SIGKILL, SIGTERM, Group, Stopping, Worker

STACK_MARGIN_S = 0.5
"""Past limits.STACK_TIMEOUT_S, what takes the stacks is itself stuck: kill without them."""


def begin(now_ns: int, group: Group, message: m.Stop) -> list[f.Output]:
    """The first Stop of a generation."""
    stop = group.stop = Stopping([message.action_id], message.grace_s)
    if not (message.stacks and group.alive):
        return carry_on(now_ns, group, stop)
    stop.stage = "stacks"
    stop.deadline_ns = now_ns + int((limits.STACK_TIMEOUT_S + STACK_MARGIN_S) * NS)
    return [f.TakeStacks(group.generation, tuple(worker.seat.rank for worker in group.alive))]


def again(now_ns: int, stop: Stopping, message: m.Stop) -> None:
    """One more Stop: it gets its own answer, and may shorten the grace."""
    if message.action_id not in stop.action_ids:
        stop.action_ids.append(message.action_id)
    if message.grace_s < stop.grace_s:
        stop.grace_s = message.grace_s
        if stop.stage == "term":
            stop.deadline_ns = now_ns + int(message.grace_s * NS)


def carry_on(now_ns: int, group: Group, stop: Stopping) -> list[f.Output]:
    """begin or stacks -> term -> kill; without grace straight to kill."""
    if stop.grace_s <= 0 or stop.stage == "term":
        return kill_all(group)
    stop.stage, stop.deadline_ns = "term", now_ns + int(stop.grace_s * NS)
    return [_signal(group, worker, SIGTERM) for worker in group.alive]


def kill_all(group: Group) -> list[f.Output]:
    if group.stop is None:
        group.stop = Stopping([], 0.0)
    group.stop.stage, group.stop.deadline_ns = "kill", None
    return [_signal(group, worker, SIGKILL) for worker in group.alive]


def _signal(group: Group, worker: Worker, signal: int) -> f.Output:
    worker.signals.add(signal)
    return f.Kill(group.generation, worker.seat.rank, signal)
