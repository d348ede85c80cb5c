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


def trained(turn: StepContext, stop: PendingStop) -> None:
    """All workers have ended in good order; their nodes told what their memory holds."""
    state = turn.state
    final = min((exit.step for _node, exit in state.exits.values()), default=-1)
    newest, held = newest_committed(state), next(iter(in_memory(state)), None)
    best = max(newest.step if newest else -1, held[0][0] if held else -1)
    if stop.lost and best < final and (newest or any(n.staged for n in state.nodes.values())):
        _compute_again(turn, f"{', '.join(stop.lost)} was lost with step {final}")
    else:
        start_drain(turn, "finish")


def _compute_again(turn: StepContext, text: str) -> None:
    """Finished steps would be lost with the job's end."""
    state = turn.state
    state.drain, state.placing = None, True
    turn.disarm("persist", "drain")
    turn.note(text)
    turn.move("recovering", "infrastructure", text)


def end_early(turn: StepContext, outcome: Outcome, code: ReasonCode, text: str) -> None:
    """The job ends before its last step. What was trained is not lost with it: the newest state in
    memory goes to storage first."""
    state = turn.state
    state.verdict, state.drain, state.placing = Reason(code, text), None, False
    state.outcome = outcome
    turn.disarm(
        "gather", "replacement", "grow", "preempt", "rejoin", "deadline", "cadence", "capacity"
    )
    turn.move("finishing", code, text)
    start_drain(turn, "end")


def end_now(turn: StepContext, why: str) -> None:
    """Somebody does not want to wait for the last checkpoint of a job that ends early."""
    verdict, outcome = turn.state.verdict, turn.state.outcome
    assert verdict is not None and outcome is not None
    finish(turn, outcome, verdict.code, f"{verdict.text}; not waiting for storage: {why}")


def start_drain(turn: StepContext, kind: DrainKind) -> None:
    """Nothing runs any more. What memory holds and storage does not, is written now."""
    state = turn.state
    newest = newest_committed(state)
    held = next(iter(in_memory(state)), None)
    if kind == "suspend" and state.phase != "suspending":
        turn.move("suspending", "suspend", state.asked)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        _drained(turn, kind, "")
        return
    (step, generation), num_shards = held
    state.drain = Drain(kind, step, generation, num_shards)
    text = f"writing step {step} to storage"
    code: ReasonCode = "finish" if kind == "finish" else "suspend"
    if state.verdict is not None:
        code, text = state.verdict.code, f"{state.verdict.text}; {text}"
    turn.move(state.phase, code, text)
    turn.arm("persist", final_timeout_s(state))
    ask(turn)


def park(turn: StepContext) -> None:
    """Nothing can be launched yet, and a node with a part of the newest state leaves, or is not
    used any more and holds what its replacement waits for: the state goes to storage, unless the
    memory of the nodes that stay has all of it."""
    state = turn.state
    if not state.placing or state.intent != "run" or state.drain is not None:
        return
    held, newest = next(iter(in_memory(state)), None), newest_committed(state)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        return
    if held in in_memory(state, leaving_too=False):
        return
    (step, generation), num_shards = held
    state.drain = Drain("park", step, generation, num_shards)
    turn.note(f"writing step {step} to storage: a node that has a part of it leaves")
    ask(turn)


def end_parking(turn: StepContext) -> None:
    """The next generation begins from memory, or somebody wants something else."""
    if turn.state.drain is not None and turn.state.drain.kind == "park":
        turn.state.drain = None
        turn.disarm("drain")


def _parked(turn: StepContext, drain: Drain) -> None:
    """Is it there, or out of reach? Then `park` looks for another."""
    newest = newest_committed(turn.state)
    if newest is not None and newest.step >= drain.step:
        turn.note(f"step {newest.step} is in storage; the leaving nodes are free to go")
        end_parking(turn)
    elif _out_of_reach(turn.state, drain):
        end_parking(turn)


def final_timeout_s(state: JobState) -> float:
    return state.job.spec.checkpoint.storage.final_timeout_s


def ask(turn: StepContext) -> None:
    """Have nodes write the shards that are missing: as few as hold them all, others each time."""
    state, drain = turn.state, turn.state.drain
    if drain is None:
        turn.disarm("drain")
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
        turn.emit(PersistStep, reason, drain.generation, node=name, step=drain.step)
    drain.attempts += 1
    # What was asked for may get lost with a link, so it is asked for again until it is here.
    turn.arm("drain", PERSIST_REPEAT_S)


def _holders(state: JobState, drain: Drain, shard: int) -> list[NodeRecord]:
    """Nodes with the shard in memory; first the one whose seat writes it anyway."""
    holders = [n for n in state.nodes.values() if shard in _held(n.staged, drain)]

    def writes(node: NodeRecord) -> bool:
        launch = state.launch.get(node.name)
        return launch is not None and any(s.persists and s.shard == shard for s in launch.seats)

    return sorted(holders, key=lambda node: not writes(node))


def _held(staged: tuple[StagedShard, ...], drain: Drain) -> list[int]:
    return [
        s.shard for s in staged
        if (s.step, s.generation, s.num_shards) == (drain.step, drain.generation, drain.num_shards)
    ]  # fmt: skip


def _missing(state: JobState, drain: Drain) -> list[int]:
    pending = state.ledger.pending.get((drain.step, drain.generation))
    have = pending.files if pending is not None else {}
    return [shard for shard in range(drain.num_shards) if shard not in have]


def persist_failed(turn: StepContext, event: PersistFailed) -> None:
    text = f"{event.node} could not write shard {event.shard} of step {event.step}: {event.detail}"
    turn.note(text)
    if turn.state.drain is not None:
        turn.state.drain.problem = text
        turn.arm("drain", PERSIST_RETRY_S)


def check_drain(turn: StepContext) -> None:
    """Is the last checkpoint committed, or out of reach?"""
    state, drain = turn.state, turn.state.drain
    if drain is None:
        return
    newest = newest_committed(state)
    if drain.kind == "park":
        _parked(turn, drain)
    elif drain.kind == "suspend" and state.intent == "run":
        state.drain, state.placing = None, True
        turn.disarm("persist", "drain")
        turn.move("recovering", "resume", "resumed before it was suspended")
    elif newest is not None and newest.step >= drain.step:
        _drained(turn, drain.kind, f"step {newest.step} is committed")
    else:
        _still_possible(turn, drain)


def _still_possible(turn: StepContext, drain: Drain) -> None:
    state = turn.state
    gone = _out_of_reach(state, drain)
    if gone:
        turn.note(f"step {drain.step}: shards {gone} were lost before they were written")
        if drain.kind == "finish":
            _compute_again(turn, f"step {drain.step} was lost before it was written")
        else:
            state.drain = None
            start_drain(turn, drain.kind)
    elif turn.due("persist"):
        _give_up(turn, drain)


def _out_of_reach(state: JobState, drain: Drain) -> list[int]:
    """Shards that are neither written nor in anybody's memory."""
    reachable = dict.fromkeys(s for n in state.nodes.values() for s in _held(n.staged, drain))
    return [shard for shard in _missing(state, drain) if shard not in reachable]


def _give_up(turn: StepContext, drain: Drain) -> None:
    """Storage does not take the last checkpoint. What was trained is lost with the nodes' memory,
    so a job that had finished has not succeeded."""
    newest = newest_committed(turn.state)
    text = (
        f"step {drain.step} was not written to storage in {final_timeout_s(turn.state):g} s "
        f"({drain.problem or 'the store has not answered'}); storage holds "
        f"{f'step {newest.step}' if newest else 'no checkpoint'}"
    )
    turn.note(text)
    if drain.kind == "finish":
        text = f"all workers ended with exit code 0, but {text}"
        finish(turn, "failed", "checkpoint", text)
    else:
        _drained(turn, drain.kind, text)


def _drained(turn: StepContext, kind: DrainKind, text: str) -> None:
    state = turn.state
    state.drain = None
    turn.disarm("persist", "drain")
    if kind == "end":
        verdict, outcome = state.verdict, state.outcome
        assert verdict is not None and outcome is not None
        finish(turn, outcome, verdict.code, f"{verdict.text}; {text}".rstrip("; "))
        return
    if kind == "finish":
        finish(
            turn, "succeeded", "finish", f"all workers ended with exit code 0; {text}".rstrip("; ")
        )
        return
    # Its nodes are given back by membership.release_surplus.
    state.members, state.placing = (), False
    state.deadline_left_s = turn.left_s("deadline")
    turn.disarm("deadline", "gather", "replacement", "grow", "preempt", "rejoin", "capacity")
    turn.move("suspended", "suspend", text or "nothing had to be written")


def finish(turn: StepContext, outcome: Outcome, code: ReasonCode, text: str) -> None:
    """The last action of the job."""
    state = turn.state
    state.placing, state.drain, state.outcome = False, None, outcome
    state.timers.clear()
    state.inflight.clear()
    turn.move(outcome, code, text)
    state.finish_action = turn.emit(FinishJob, Reason(code, text), outcome=outcome)


def finish_again(turn: StepContext, why: str) -> None:
    """The result of FinishJob was lost, or it failed."""
    state = turn.state
    turn.disarm("finish")
    assert state.outcome is not None
    state.finish_action = turn.emit(
        FinishJob, Reason(state.reason.code, f"{state.reason.text} ({why})"), outcome=state.outcome
    )


# -- storage by time --------------------------------------------------------------------------
def persist_ahead(turn: StepContext, why: str) -> None:
    """Have all nodes write the same step, a little ahead of where they are."""
    state = turn.state
    # A node that does not stage this very step writes the first one after it, as all do.
    step = step_ahead(state)
    for name in state.members:
        if name in state.nodes:
            turn.emit(PersistStep, Reason("checkpoint", why), node=name, step=step)


def cadence_due(turn: StepContext) -> None:
    every_s = turn.state.job.spec.checkpoint.storage.every_s
    if every_s is not None:
        age = (turn.now - turn.state.ledger.last_commit_ns) / SECOND_NS
        persist_ahead(turn, f"the last one is {age:.0f} s old, {every_s:g} s wanted")
        turn.arm("cadence", every_s)
