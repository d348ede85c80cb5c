"""The end of a job, or its rest: the last checkpoint reaches storage, then nodes are given back.

Owns: drains, FinishJob and suspension. Must not: stop workers (recovery.py does).
"""

from __future__ import annotations

from ..protocol import limits
from ..protocol.facts import StagedShard
from .actions import FinishJob, Outcome, PersistStep, Reason, ReasonCode
from .checkpoints import in_memory, newest_committed
from .events import PersistFailed
from .membership import release
from .state import Drain, DrainKind, JobState, Stop
from .turn import SECOND_NS, Turn

PERSIST_RETRY_S = 1.0
CADENCE_MARGIN_S = 2.0
"""A step that all nodes are asked to write must lie ahead of what any of them has done."""


def trained(turn: Turn, stop: Stop) -> None:
    """All workers have ended in good order; their nodes told what their memory holds."""
    state = turn.state
    final = min((exit.step for _node, exit in state.exits.values()), default=-1)
    newest, held = newest_committed(state), next(iter(in_memory(state)), None)
    best = max(newest.step if newest else -1, held[0][0] if held else -1)
    if stop.lost and best < final and (newest or any(n.staged for n in state.nodes.values())):
        _compute_again(turn, f"{', '.join(stop.lost)} was lost with step {final}")
    else:
        start_drain(turn, "finish")


def _compute_again(turn: Turn, text: str) -> None:
    """Finished steps would be lost with the job's end."""
    state = turn.state
    state.drain, state.placing = None, True
    turn.disarm("persist", "drain")
    turn.note(text)
    turn.move("recovering", "infrastructure", text)


def start_drain(turn: Turn, kind: DrainKind) -> None:
    """Nothing runs any more. What memory holds and storage does not, is written now."""
    state = turn.state
    newest = newest_committed(state)
    held = next(iter(in_memory(state)), None)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        _drained(turn, kind, "")
        return
    (step, generation), num_shards = held
    state.drain = Drain(kind, step, generation, num_shards)
    code: ReasonCode = "finish" if kind == "finish" else "suspend"
    if kind == "suspend" and state.phase != "suspending":
        turn.move("suspending", code, f"writing step {step} to storage")
    else:
        turn.move(state.phase, code, f"writing step {step} to storage")
    turn.arm("persist", limits.PERSIST_TIMEOUT_S)
    ask(turn)


def ask(turn: Turn) -> None:
    """Have every node that holds a missing shard write it."""
    turn.disarm("drain")
    state, drain = turn.state, turn.state.drain
    if drain is None:
        return
    drain.attempts += 1
    reason = Reason("checkpoint", f"step {drain.step} is in memory only")
    missing = _missing(state, drain)
    for node in state.nodes.values():
        if any(shard in missing for shard in _held(node.staged, drain)):
            drain.waiting[node.name] = turn.emit(
                PersistStep, reason, drain.generation, node=node.name, step=drain.step
            )


def _held(staged: tuple[StagedShard, ...], drain: Drain) -> list[int]:
    return [
        s.shard for s in staged
        if (s.step, s.generation, s.num_shards) == (drain.step, drain.generation, drain.num_shards)
    ]  # fmt: skip


def _missing(state: JobState, drain: Drain) -> list[int]:
    pending = state.ledger.pending.get((drain.step, drain.generation))
    have = pending.files if pending is not None else {}
    return [shard for shard in range(drain.num_shards) if shard not in have]


def persist_failed(turn: Turn, event: PersistFailed) -> None:
    turn.note(
        f"{event.node} could not write shard {event.shard} of step {event.step}: {event.detail}"
    )
    if turn.state.drain is not None:
        turn.arm_once("drain", PERSIST_RETRY_S)


def check_drain(turn: Turn) -> None:
    """Is the last checkpoint committed, or out of reach?"""
    state, drain = turn.state, turn.state.drain
    if drain is None:
        return
    newest = newest_committed(state)
    if newest is not None and newest.step >= drain.step:
        _drained(turn, drain.kind, f"step {newest.step} is committed")
        return
    reachable = dict.fromkeys(s for n in state.nodes.values() for s in _held(n.staged, drain))
    gone = [shard for shard in _missing(state, drain) if shard not in reachable]
    if gone:
        turn.note(f"step {drain.step}: shards {gone} were lost before they were written")
        if drain.kind == "finish":
            _compute_again(turn, f"step {drain.step} was lost before it was written")
        else:
            state.drain = None
            start_drain(turn, drain.kind)
    elif turn.due("persist"):
        text = f"step {drain.step} was not written in {limits.PERSIST_TIMEOUT_S:g} s"
        turn.note(text)
        _drained(turn, drain.kind, text)


def _drained(turn: Turn, kind: DrainKind, text: str) -> None:
    state = turn.state
    state.drain = None
    turn.disarm("persist", "drain")
    if kind == "finish":
        finish(
            turn, "succeeded", "finish", f"all workers ended with exit code 0; {text}".rstrip("; ")
        )
        return
    for name in list(state.nodes):
        release(turn, name, "suspend", "the job is suspended")
    state.members, state.placing = (), False
    turn.disarm("gather", "replacement", "grow", "preempt", "rejoin")
    turn.move("suspended", "suspend", text or "nothing had to be written")


def finish(turn: Turn, outcome: Outcome, code: ReasonCode, text: str) -> None:
    """The last action of the job."""
    state = turn.state
    state.placing, state.drain, state.outcome = False, None, outcome
    state.timers.clear()
    state.inflight.clear()
    turn.move(outcome, code, text)
    state.finish_action = turn.emit(FinishJob, Reason(code, text), outcome=outcome)


def finish_again(turn: Turn, why: str) -> None:
    """The result of FinishJob was lost, or it failed."""
    state = turn.state
    turn.disarm("finish")
    assert state.outcome is not None
    state.finish_action = turn.emit(
        FinishJob, Reason(state.reason.code, f"{state.reason.text} ({why})"), outcome=state.outcome
    )


# -- storage by time --------------------------------------------------------------------------
def persist_ahead(turn: Turn, step_s: float, why: str) -> None:
    """Have all nodes write the same step, a little ahead of where they are."""
    state = turn.state
    every = max(1, state.job.spec.checkpoint.memory.every_steps)
    margin = 2 + int(CADENCE_MARGIN_S / step_s) if step_s > 0 else 2
    step = (state.step + margin + every - 1) // every * every
    for name in state.members:
        if name in state.nodes:
            turn.emit(PersistStep, Reason("checkpoint", why), node=name, step=step)


def cadence_due(turn: Turn, step_s: float) -> None:
    every_s = turn.state.job.spec.checkpoint.storage.every_s
    if every_s is not None:
        age = (turn.now - turn.state.ledger.last_commit_ns) / SECOND_NS
        persist_ahead(turn, step_s, f"the last one is {age:.0f} s old, {every_s:g} s wanted")
        turn.arm("cadence", every_s)
