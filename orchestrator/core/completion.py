"""The end of a job, or its rest: the last checkpoint reaches storage, then nodes are given back.

Owns: drains, FinishJob and suspension. Must not: stop workers (recovery.py does).
"""

from __future__ import annotations

from ..protocol.facts import StagedShard
from .actions import FinishJob, Outcome, PersistStep, Reason, ReasonCode
from .checkpoints import in_memory, newest_committed
from .context import SECOND_NS, StepContext
from .events import PersistFailed
from .quiesce import step_ahead
from .state import Drain, DrainKind, JobState, NodeRecord, PendingStop

PERSIST_RETRY_S = 1.0
PERSIST_REPEAT_S = 10.0


def trained(ctx: StepContext, stop: PendingStop) -> None:
    """All workers have ended in good order; their nodes told what their memory holds."""
    state = ctx.state
    final = min((exit.step for _node, exit in state.exits.values()), default=-1)
    newest, held = newest_committed(state), next(iter(in_memory(state)), None)
    best = max(newest.step if newest else -1, held[0][0] if held else -1)
    if stop.lost and best < final and (newest or any(n.staged for n in state.nodes.values())):
        _compute_again(ctx, f"{', '.join(stop.lost)} was lost with step {final}")
    else:
        start_drain(ctx, "finish")


def _compute_again(ctx: StepContext, text: str) -> None:
    """Finished steps would be lost with the job's end."""
    state = ctx.state
    state.drain, state.needs_placement = None, True
    ctx.disarm("persist", "drain")
    ctx.note(text)
    ctx.move("recovering", "infrastructure", text)


def end_early(ctx: StepContext, outcome: Outcome, code: ReasonCode, text: str) -> None:
    """The job ends before its last step. What was trained is not lost with it: the newest state in
    memory goes to storage first."""
    state = ctx.state
    state.termination_reason, state.drain, state.needs_placement = Reason(code, text), None, False
    state.outcome = outcome
    ctx.disarm(
        "gather", "replacement", "grow", "preempt", "rejoin", "deadline", "cadence", "capacity"
    )
    ctx.move("finishing", code, text)
    start_drain(ctx, "end")


def end_now(ctx: StepContext, why: str) -> None:
    """Somebody does not want to wait for the last checkpoint of a job that ends early."""
    verdict, outcome = ctx.state.termination_reason, ctx.state.outcome
    assert verdict is not None and outcome is not None
    finish(ctx, outcome, verdict.code, f"{verdict.text}; not waiting for storage: {why}")


def start_drain(ctx: StepContext, kind: DrainKind) -> None:
    """Nothing runs any more. What memory holds and storage does not, is written now."""
    state = ctx.state
    newest = newest_committed(state)
    held = next(iter(in_memory(state)), None)
    if kind == "suspend" and state.phase != "suspending":
        ctx.move("suspending", "suspend", state.intent_reason)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        _drained(ctx, kind, "")
        return
    (step, generation), num_shards = held
    state.drain = Drain(kind, step, generation, num_shards)
    text = f"writing step {step} to storage"
    code: ReasonCode = "finish" if kind == "finish" else "suspend"
    if state.termination_reason is not None:
        code, text = state.termination_reason.code, f"{state.termination_reason.text}; {text}"
    ctx.move(state.phase, code, text)
    ctx.arm("persist", final_timeout_s(state))
    ask(ctx)


def park(ctx: StepContext) -> None:
    """Nothing can be launched yet, and a node with a part of the newest state leaves, or is not
    used any more and holds what its replacement waits for: the state goes to storage, unless the
    memory of the nodes that stay has all of it."""
    state = ctx.state
    if not state.needs_placement or state.intent != "run" or state.drain is not None:
        return
    held, newest = next(iter(in_memory(state)), None), newest_committed(state)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        return
    if held in in_memory(state, leaving_too=False):
        return
    (step, generation), num_shards = held
    state.drain = Drain("park", step, generation, num_shards)
    ctx.note(f"writing step {step} to storage: a node that has a part of it leaves")
    ask(ctx)


def end_parking(ctx: StepContext) -> None:
    """The next generation begins from memory, or somebody wants something else."""
    if ctx.state.drain is not None and ctx.state.drain.kind == "park":
        ctx.state.drain = None
        ctx.disarm("drain")


def _parked(ctx: StepContext, drain: Drain) -> None:
    """Is it there, or out of reach? Then `park` looks for another."""
    newest = newest_committed(ctx.state)
    if newest is not None and newest.step >= drain.step:
        ctx.note(f"step {newest.step} is in storage; the leaving nodes are free to go")
        end_parking(ctx)
    elif _out_of_reach(ctx.state, drain):
        end_parking(ctx)


def final_timeout_s(state: JobState) -> float:
    return state.job.spec.checkpoint.storage.final_timeout_s


def ask(ctx: StepContext) -> None:
    """Have nodes write the shards that are missing: as few as hold them all, others each time."""
    state, drain = ctx.state, ctx.state.drain
    if drain is None:
        ctx.disarm("drain")
        return
    reason = Reason("checkpoint", f"step {drain.step} is in memory only")
    asked: dict[str, None] = {}
    covered: dict[int, None] = {}
    for shard in _missing(state, drain):
        holders = [n for n in _holders(state, drain, shard) if n.confirmed]
        if shard in covered or not holders:
            continue
        node = holders[drain.attempts % len(holders)]
        asked[node.name] = None
        covered.update(dict.fromkeys(_held(node.staged, drain)))
    for name in asked:
        ctx.emit(PersistStep, reason, drain.generation, node=name, step=drain.step)
    drain.attempts += 1
    # What was asked for may get lost with a link, so it is asked for again until it is here.
    ctx.arm("drain", PERSIST_REPEAT_S)


def _holders(state: JobState, drain: Drain, shard: int) -> list[NodeRecord]:
    """Nodes with the shard in memory; first the one whose seat writes it anyway."""
    holders = [n for n in state.nodes.values() if shard in _held(n.staged, drain)]

    def writes(node: NodeRecord) -> bool:
        launch = state.launch_actions.get(node.name)
        return launch is not None and any(s.persists and s.shard == shard for s in launch.seats)

    return sorted(holders, key=lambda node: not writes(node))


def _held(staged: tuple[StagedShard, ...], drain: Drain) -> list[int]:
    return [
        s.shard for s in staged
        if (s.step, s.generation, s.num_shards) == (drain.step, drain.generation, drain.num_shards)
    ]  # fmt: skip


def _missing(state: JobState, drain: Drain) -> list[int]:
    pending = state.catalog.pending.get((drain.step, drain.generation))
    have = pending.files if pending is not None else {}
    return [shard for shard in range(drain.num_shards) if shard not in have]


def persist_failed(ctx: StepContext, event: PersistFailed) -> None:
    text = f"{event.node} could not write shard {event.shard} of step {event.step}: {event.detail}"
    ctx.note(text)
    if ctx.state.drain is not None:
        ctx.state.drain.problem = text
        ctx.arm("drain", PERSIST_RETRY_S)


def check_drain(ctx: StepContext) -> None:
    """Is the last checkpoint committed, or out of reach?"""
    state, drain = ctx.state, ctx.state.drain
    if drain is None:
        return
    newest = newest_committed(state)
    if drain.kind == "park":
        _parked(ctx, drain)
    elif drain.kind == "suspend" and state.intent == "run":
        state.drain, state.needs_placement = None, True
        ctx.disarm("persist", "drain")
        ctx.move("recovering", "resume", "resumed before it was suspended")
    elif newest is not None and newest.step >= drain.step:
        _drained(ctx, drain.kind, f"step {newest.step} is committed")
    else:
        _still_possible(ctx, drain)


def _still_possible(ctx: StepContext, drain: Drain) -> None:
    state = ctx.state
    gone = _out_of_reach(state, drain)
    if gone:
        ctx.note(f"step {drain.step}: shards {gone} were lost before they were written")
        if drain.kind == "finish":
            _compute_again(ctx, f"step {drain.step} was lost before it was written")
        else:
            state.drain = None
            start_drain(ctx, drain.kind)
    elif ctx.due("persist"):
        _give_up(ctx, drain)


def _out_of_reach(state: JobState, drain: Drain) -> list[int]:
    """Shards that are neither written nor in anybody's memory."""
    reachable = dict.fromkeys(s for n in state.nodes.values() for s in _held(n.staged, drain))
    return [shard for shard in _missing(state, drain) if shard not in reachable]


def _give_up(ctx: StepContext, drain: Drain) -> None:
    """Storage does not take the last checkpoint. What was trained is lost with the nodes' memory,
    so a job that had finished has not succeeded."""
    newest = newest_committed(ctx.state)
    text = (
        f"step {drain.step} was not written to storage in {final_timeout_s(ctx.state):g} s "
        f"({drain.problem or 'the store has not answered'}); storage holds "
        f"{f'step {newest.step}' if newest else 'no checkpoint'}"
    )
    ctx.note(text)
    if drain.kind == "finish":
        text = f"all workers ended with exit code 0, but {text}"
        finish(ctx, "failed", "checkpoint", text)
    else:
        _drained(ctx, drain.kind, text)


def _drained(ctx: StepContext, kind: DrainKind, text: str) -> None:
    state = ctx.state
    state.drain = None
    ctx.disarm("persist", "drain")
    if kind == "end":
        verdict, outcome = state.termination_reason, state.outcome
        assert verdict is not None and outcome is not None
        finish(ctx, outcome, verdict.code, f"{verdict.text}; {text}".rstrip("; "))
        return
    if kind == "finish":
        finish(
            ctx, "succeeded", "finish", f"all workers ended with exit code 0; {text}".rstrip("; ")
        )
        return
    # Its nodes are given back by membership.release_surplus.
    state.members, state.needs_placement = (), False
    state.deadline_left_s = ctx.left_s("deadline")
    ctx.disarm("deadline", "gather", "replacement", "grow", "preempt", "rejoin", "capacity")
    ctx.move("suspended", "suspend", text or "nothing had to be written")


def finish(ctx: StepContext, outcome: Outcome, code: ReasonCode, text: str) -> None:
    """The last action of the job."""
    state = ctx.state
    state.needs_placement, state.drain, state.outcome = False, None, outcome
    state.timers.clear()
    state.inflight.clear()
    ctx.move(outcome, code, text)
    state.finish_action = ctx.emit(FinishJob, Reason(code, text), outcome=outcome)


def finish_again(ctx: StepContext, why: str) -> None:
    """The result of FinishJob was lost, or it failed."""
    state = ctx.state
    ctx.disarm("finish")
    assert state.outcome is not None
    state.finish_action = ctx.emit(
        FinishJob, Reason(state.reason.code, f"{state.reason.text} ({why})"), outcome=state.outcome
    )


# -- storage by time --------------------------------------------------------------------------
def persist_ahead(ctx: StepContext, why: str) -> None:
    """Have all nodes write the same step, a little ahead of where they are."""
    state = ctx.state
    # A node that does not stage this very step writes the first one after it, as all do.
    step = step_ahead(state)
    for name in state.members:
        if name in state.nodes:
            ctx.emit(PersistStep, Reason("checkpoint", why), node=name, step=step)


def cadence_due(ctx: StepContext) -> None:
    every_s = ctx.state.job.spec.checkpoint.storage.every_s
    if every_s is not None:
        age = (ctx.now_ns - ctx.state.catalog.last_commit_ns) / SECOND_NS
        persist_ahead(ctx, f"the last one is {age:.0f} s old, {every_s:g} s wanted")
        ctx.arm("cadence", every_s)
