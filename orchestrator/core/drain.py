"""Drain: write the newest state in memory to storage before the nodes that hold it are released.

`state.drain` names the state that is written. completion.py decides what happens when it is
committed, or cannot be; a state at risk is written without any further decision.
"""

from __future__ import annotations

from typing import Literal

from ..protocol.facts import StagedShard, state_after
from ..protocol.messages import PersistFailed
from .actions import PersistStep, Reason
from .checkpoints import in_memory, newest_committed, unsaved
from .context import SECOND_NS, StepContext
from .quiesce import step_ahead
from .roster import NodeRecord
from .state import DRAIN, Drain, DrainKind, JobState

RETRY_S = 1.0
REPEAT_S = 10.0


def start(ctx: StepContext, kind: DrainKind) -> Drain | None:
    """Write what only memory has; None: there is no such state. No workers run."""
    newest = unsaved(ctx.state)
    if newest is None:
        return None
    (step, generation), num_shards = newest
    drain = ctx.state.drain = Drain(kind, step, generation, num_shards)
    if kind != DrainKind.AT_RISK:
        ctx.arm("persist", final_timeout_s(ctx.state))
    request_persist(ctx)
    return drain


def end(ctx: StepContext) -> None:
    ctx.state.drain = None
    ctx.disarm(*DRAIN)


def final_timeout_s(state: JobState) -> float:
    return state.job.spec.checkpoint.storage.final_timeout_s


def controller_started(ctx: StepContext) -> None:
    """The next controller allows the whole time again."""
    if (drain := ctx.state.drain) is None:
        return
    if drain.kind != DrainKind.AT_RISK:
        ctx.arm("persist", final_timeout_s(ctx.state))
    ctx.arm("drain", RETRY_S)


def progress(state: JobState, drain: Drain) -> Literal["committed", "lost", "under way"]:
    newest = newest_committed(state)
    if newest is not None and newest.step >= drain.step:
        return "committed"
    return "lost" if lost_shards(state, drain) else "under way"


def lost_shards(state: JobState, drain: Drain) -> list[int]:
    """Shards that are neither written nor in the memory of any node."""
    reachable = state.nodes.holders.get((drain.step, drain.generation, drain.num_shards), ())
    if len(reachable) == drain.num_shards:
        return []
    return [shard for shard in _missing(state, drain) if shard not in reachable]


# -- a state at risk --------------------------------------------------------------------------
def persist_at_risk(ctx: StepContext) -> None:
    """Reconciler. No generation can be launched yet, and a node with a part of the newest state
    leaves, or is cordoned and holds the capacity that its replacement waits for: the state goes to
    storage, unless the nodes that stay have all of it."""
    state = ctx.state
    if not state.needs_placement or state.intent != "run" or state.drain is not None:
        return
    held = unsaved(state)
    away = [*state.nodes.leaving, *state.ledger.cordoned]
    if held is None or held in in_memory(state, without=away):
        return
    start(ctx, DrainKind.AT_RISK)
    ctx.note(f"writing {state_after(held[0][0])} to storage: a node that holds a part of it leaves")


def check_at_risk(ctx: StepContext, drain: Drain) -> None:
    """Follow a drain at risk. If its state is lost, persist_at_risk looks for another one."""
    outcome = progress(ctx.state, drain)
    if outcome == "committed":
        ctx.note(f"{state_after(drain.step)} is in storage; the leaving nodes can be released")
    if outcome != "under way":
        end(ctx)


# -- requests to nodes ------------------------------------------------------------------------
def request_persist(ctx: StepContext) -> None:
    """Have as few nodes as hold the missing shards write them, others with each attempt."""
    state, drain = ctx.state, ctx.state.drain
    assert drain is not None, "its timer is disarmed with the drain"
    reason = Reason("checkpoint", f"{state_after(drain.step)} is in memory only")
    chosen, covered = dict[str, None](), set[int]()
    for shard in _missing(state, drain):
        holders = [n for n in _holders(state, drain, shard) if n.confirmed]
        if shard in covered or not holders:
            continue
        node = holders[drain.attempts % len(holders)]
        chosen[node.name] = None
        covered.update(_held(node.staged, drain))
    for name in chosen:
        ctx.emit(PersistStep, reason, drain.generation, node=name, step=drain.step)
    drain.attempts += 1
    # A request may get lost with a connection, so it is repeated until the files are reported.
    ctx.arm("drain", REPEAT_S)


def _holders(state: JobState, drain: Drain, shard: int) -> list[NodeRecord]:
    """Nodes with the shard in memory; first the one whose seat writes it anyway."""
    holders = [n for n in state.nodes.values() if shard in _held(n.staged, drain)]

    def writes(node: NodeRecord) -> bool:
        launch = state.group.launches.get(node.name)
        return launch is not None and any(s.persists and s.shard == shard for s in launch.seats)

    return sorted(holders, key=lambda node: not writes(node))


def _held(staged: tuple[StagedShard, ...], drain: Drain) -> list[int]:
    key = (drain.step, drain.generation, drain.num_shards)
    return [s.shard for s in staged if (s.step, s.generation, s.num_shards) == key]


def _missing(state: JobState, drain: Drain) -> list[int]:
    pending = state.catalog.pending.get((drain.step, drain.generation))
    have = pending.files if pending is not None else {}
    return [shard for shard in range(drain.num_shards) if shard not in have]


def persist_failed(ctx: StepContext, node: str, fact: PersistFailed) -> None:
    text = f"{node} could not write shard {fact.shard} of {state_after(fact.step)}: {fact.detail}"
    ctx.note(text)
    if ctx.state.drain is not None:
        ctx.state.drain.problem = text
        ctx.arm("drain", RETRY_S)


# -- storage by time --------------------------------------------------------------------------
def cadence_due(ctx: StepContext) -> None:
    """storage.everySeconds: all nodes write the same step, a little ahead of where they are."""
    state = ctx.state
    every_s = state.job.spec.checkpoint.storage.every_s
    assert every_s is not None, "the timer is armed with it"
    age_s = (ctx.now_ns - state.catalog.last_commit_ns) / SECOND_NS
    why = f"the last checkpoint is {age_s:.0f} s old; one is wanted every {every_s:g} s"
    # A node that does not stage this step writes the first one after it, as all do.
    step = step_ahead(state)
    for node in state.group.members:
        ctx.emit(PersistStep, Reason("checkpoint", why), node=node, step=step)
    ctx.arm("cadence", every_s)
