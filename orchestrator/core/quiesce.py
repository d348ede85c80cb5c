"""Before a planned interruption all ranks stage the same step, so that none that is done is lost.

Owns: state.quiesce. Must not: stop anything; recovery.py does, once nothing is waited for here.

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
    return max(0.0, PACE_S - (state.now_ns - state.first_step_ns) / SECOND_NS)


def is_awaited(ctx: StepContext, purpose: Purpose, reason: Reason) -> bool:
    """Whether an interruption has to wait for a step to be staged; begins that if it makes sense.
    To be asked again with every ctx."""
    state = ctx.state
    if purpose in UNPLANNED or not state.first_step_done:
        return False
    if state.job.spec.checkpoint.staging_interval <= 1:
        return False
    if state.quiesce is None:
        members = [state.nodes.get(name) for name in state.members]
        if not all(node is not None and node.confirmed for node in members):
            # A new controller hears of them soon.
            return purpose != "preemption" and "rejoin" in state.timers
        left_s, room_s = pace_left_s(state), _room_s(ctx)
        if left_s and (room_s is None or room_s > left_s):
            ctx.arm("stage", left_s)
            return True
        if not _begin(ctx, reason):
            return False
    assert state.quiesce is not None
    state.quiesce.requested_ns = ctx.now_ns
    if (room_s := _room_s(ctx)) is not None:  # the notice may have come meanwhile
        state.timers["stage"] = min(state.timers["stage"], ctx.now_ns + seconds(room_s))
    return bool(state.quiesce.waiting) and not ctx.due("stage")


def _begin(ctx: StepContext, reason: Reason) -> bool:
    state = ctx.state
    step = step_ahead(state)
    wait_s = (step - state.step) * state.step_s
    room_s = _room_s(ctx)
    if room_s is not None and room_s < wait_s:
        return False
    why = Reason(reason.code, f"{reason.text}; step {step} is staged first")
    waiting = {name: ctx.emit(StageStep, why, node=name, step=step) for name in state.members}
    state.quiesce = Quiesce(step, waiting, ctx.now_ns)
    ctx.arm("stage", SLACK_S + 1.5 * wait_s)
    ctx.move(state.phase, why.code, why.text)
    return True


def _room_s(ctx: StepContext) -> float | None:
    """How long may be waited, whatever for, with the member that is taken away first; None: none
    is, as far as is known."""
    members = [ctx.state.nodes[name] for name in ctx.state.members]
    known = [node.leaves_ns for node in members if node.leaves_ns is not None]
    return SHARE * (min(known) - ctx.now_ns) / SECOND_NS if known else None


def answered(ctx: StepContext, action: StageStep, problem: str = "") -> None:
    """A node has staged it, or cannot: then the others need not either."""
    staging = ctx.state.quiesce
    if staging is None or staging.waiting.get(action.node) != action.action_id:
        return
    del staging.waiting[action.node]
    if problem:
        ctx.note(f"step {action.step} was not staged by all: {action.node}: {problem}")
        hurry(ctx)


def hurry(ctx: StepContext) -> None:
    """Nobody wants to wait any longer."""
    if ctx.state.quiesce is not None:
        ctx.state.quiesce.waiting.clear()


def end(ctx: StepContext) -> None:
    """The interruption begins, or another has come first."""
    ctx.state.quiesce = None
    ctx.disarm("stage")


def drop(ctx: StepContext) -> None:
    """Nobody wants the interruption any more. Workers that wait for it go on by themselves."""
    staging = ctx.state.quiesce
    if staging is not None and staging.requested_ns < ctx.now_ns:
        end(ctx)
        text = "training goes on: what was to interrupt it was taken back"
        ctx.move(ctx.state.phase, ctx.state.reason.code, text)
