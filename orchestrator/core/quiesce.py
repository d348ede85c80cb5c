"""Before a planned interruption all ranks stage the same step, so that none that is done is lost.

Owns: state.staging. Must not: stop anything; recovery.py does, once nothing is waited for here.

Only where workers do not stage every step anyway. One step is asked for, a little ahead of where
they are, and only once: memory keeps the two newest of each node, so the last one that is complete
over all nodes stays there, whoever misses this one. Training goes on meanwhile.
"""

from __future__ import annotations

from .actions import Reason, StageStep
from .context import SECOND_NS, StepContext, seconds
from .state import JobState, Purpose, Quiesce

MARGIN_S = 4.0
"""The step asked for lies ahead of what any rank has done: progress is heard of every second, later
on a busy machine, and steps may be twice as quick as those before. Training goes on meanwhile."""
PACE_S = 2.0
"""From the first step of a generation: the second report of progress has come by then. The first
one's step time has the start-up in it, and would put the step far behind ranks that are quick."""
SLACK_S = 5.0
"""The last step time may not be the next one, and the copy takes its time as well."""
SHARE = 1 / 3
"""Of the time that a leaving node still has."""
UNPLANNED: tuple[Purpose, ...] = ("failure", "finish")


def step_ahead(state: JobState) -> int:
    """A step that no rank has finished when the order to do something with it arrives."""
    return state.step + 2 + (int(MARGIN_S / state.step_s) if state.step_s > 0 else 0)


def pace_left_s(state: JobState) -> float:
    """Until the pace of this generation is known."""
    return max(0.0, PACE_S - (state.now_ns - state.stepped_ns) / SECOND_NS)


def is_awaited(turn: StepContext, purpose: Purpose, reason: Reason) -> bool:
    """Whether an interruption has to wait for a step to be staged; begins that if it makes sense.
    To be asked again with every turn."""
    state = turn.state
    if purpose in UNPLANNED or not state.stepped:
        return False
    if state.job.spec.checkpoint.staging_interval <= 1:
        return False
    if state.staging is None:
        members = [state.nodes.get(name) for name in state.members]
        if not all(node is not None and node.confirmed for node in members):
            # A new controller hears of them soon.
            return purpose != "preemption" and "rejoin" in state.timers
        left_s, room_s = pace_left_s(state), _room_s(turn)
        if left_s and (room_s is None or room_s > left_s):
            turn.arm("stage", left_s)
            return True
        if not _begin(turn, reason):
            return False
    assert state.staging is not None
    state.staging.wanted_ns = turn.now
    if (room_s := _room_s(turn)) is not None:  # the notice may have come meanwhile
        state.timers["stage"] = min(state.timers["stage"], turn.now + seconds(room_s))
    return bool(state.staging.waiting) and not turn.due("stage")


def _begin(turn: StepContext, reason: Reason) -> bool:
    state = turn.state
    step = step_ahead(state)
    wait_s = (step - state.step) * state.step_s
    room_s = _room_s(turn)
    if room_s is not None and room_s < wait_s:
        return False
    why = Reason(reason.code, f"{reason.text}; step {step} is staged first")
    waiting = {name: turn.emit(StageStep, why, node=name, step=step) for name in state.members}
    state.staging = Quiesce(step, waiting, turn.now)
    turn.arm("stage", SLACK_S + 1.5 * wait_s)
    turn.move(state.phase, why.code, why.text)
    return True


def _room_s(turn: StepContext) -> float | None:
    """How long may be waited, whatever for, with the member that is taken away first; None: none
    is, as far as is known."""
    members = [turn.state.nodes[name] for name in turn.state.members]
    known = [node.leaves_ns for node in members if node.leaves_ns is not None]
    return SHARE * (min(known) - turn.now) / SECOND_NS if known else None


def answered(turn: StepContext, action: StageStep, problem: str = "") -> None:
    """A node has staged it, or cannot: then the others need not either."""
    staging = turn.state.staging
    if staging is None or staging.waiting.get(action.node) != action.action_id:
        return
    del staging.waiting[action.node]
    if problem:
        turn.note(f"step {action.step} was not staged by all: {action.node}: {problem}")
        hurry(turn)


def hurry(turn: StepContext) -> None:
    """Nobody wants to wait any longer."""
    if turn.state.staging is not None:
        turn.state.staging.waiting.clear()


def end(turn: StepContext) -> None:
    """The interruption begins, or another has come first."""
    turn.state.staging = None
    turn.disarm("stage")


def drop(turn: StepContext) -> None:
    """Nobody wants the interruption any more. Workers that wait for it go on by themselves."""
    staging = turn.state.staging
    if staging is not None and staging.wanted_ns < turn.now:
        end(turn)
        text = "training goes on: what was to interrupt it was taken back"
        turn.move(turn.state.phase, turn.state.reason.code, text)
