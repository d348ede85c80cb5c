"""Quiesce: all ranks stage the same step before a planned interruption, so that no step is lost.

Only needed where workers do not stage every step anyway, and only of use where they stage: a script
that keeps its own checkpoints learns from the stop itself after which step it has to save. The
agents are asked for one step, a little ahead of where the ranks are. If a rank was past it already,
a later one is requested once, if there is time: the memory tier keeps the newest step that is
complete over all nodes. Training continues meanwhile; recovery.py stops the generation afterwards.
"""

from __future__ import annotations

from ..protocol.facts import state_after
from .actions import Reason, StageStep
from .context import SECOND_NS, StepContext, seconds
from .nodes import leaving_members
from .state import Cause, JobState, Purpose, Quiesce

MARGIN_S = 4.0
"""Seconds from the slowest rank to the step. Progress is reported every second, later on a busy
machine, and the next steps may be twice as quick as the last ones."""
PACE_S = 2.0
"""Time from the first step of a generation to the second progress report. The first report's step
time includes the start-up; a step computed from it would lie far ahead of the ranks."""
SLACK_S = 5.0
"""The next step may be slower than the last one, and the copy takes time as well."""
SHARE = 1 / 3
"""The share of a leaving node's remaining time that may be spent on waiting."""
SECOND_MARGIN_S = 12.0
"""Margin of the second request, after a rank was past the first step: reports come late where the
CPUs are busy. There is no third one, as the interruption waits."""
AT_ONCE: tuple[Purpose, ...] = ("failure", "finish", "new-code")
"""Interruptions that stop workers at once. A user waits for edited code, so steps since the last
staged one are trained again."""


def step_ahead(state: JobState, margin_s: float = MARGIN_S) -> int:
    """A step that no rank will have finished when a request that names it arrives."""
    return state.step + 2 + (int(margin_s / state.step_s) if state.step_s > 0 else 0)


def last_step(state: JobState, grace_s: float) -> int:
    """The step after which a script that keeps its own checkpoints saves in a stop with this grace;
    -1: it reports no steps, or the step would come too late."""
    step = step_ahead(state)
    wait_s = (step - state.step) * state.step_s
    return step if state.counted_by == "script" and wait_s < grace_s else -1


def pace_left_s(state: JobState) -> float:
    """Time until the step time of this generation is known."""
    return max(0.0, PACE_S - (state.now_ns - state.group.first_step_ns) / SECOND_NS)


def prepare(ctx: StepContext, cause: Cause) -> None:
    """Request a step, or keep waiting for the one that was requested. Called in every step of the
    controller in which the interruption is wanted."""
    state = ctx.state
    if not _useful(state, cause.purpose):
        return
    if state.quiesce is None and _all_members_confirmed(state):
        if _pace_unknown(ctx):
            ctx.arm("stage", pace_left_s(state))
        else:
            _request(ctx, cause.reason)
    elif state.quiesce is not None and state.quiesce.missed and not state.quiesce.again:
        _request(ctx, cause.reason, SECOND_MARGIN_S)
    if state.quiesce is not None:
        state.quiesce.requested_ns = ctx.now_ns
        room_s = _room_s(ctx)
        if room_s is not None:  # the preemption notice may have come after the request
            state.timers["stage"] = min(state.timers["stage"], ctx.now_ns + seconds(room_s))


def awaited(ctx: StepContext, purpose: Purpose) -> bool:
    """The interruption has to wait."""
    state = ctx.state
    if not _useful(state, purpose):
        return False
    if state.quiesce is not None:
        return bool(state.quiesce.waiting) and not ctx.due("stage")
    if not _all_members_confirmed(state):
        return purpose != "preemption" and "rejoin" in state.timers
    return _pace_unknown(ctx)


def _useful(state: JobState, purpose: Purpose) -> bool:
    staged = state.stage_every_steps <= 1 or state.keeps_own_checkpoints
    return purpose not in AT_ONCE and state.group.first_step_ns > 0 and not staged


def _all_members_confirmed(state: JobState) -> bool:
    """False only while a new controller waits for its nodes."""
    return not any(state.is_member(name) for name in state.nodes.unconfirmed)


def _pace_unknown(ctx: StepContext) -> bool:
    """The step time is not known yet, and there is time to wait for it."""
    left_s, room_s = pace_left_s(ctx.state), _room_s(ctx)
    return left_s > 0 and (room_s is None or room_s > left_s)


def _request(ctx: StepContext, reason: Reason, margin_s: float = MARGIN_S) -> None:
    state, before = ctx.state, ctx.state.quiesce
    step = step_ahead(state, margin_s)
    if before is not None:
        step = max(step, before.step + 1)
    wait_s = (step - state.step) * state.step_s
    room_s = _room_s(ctx)
    if room_s is not None and room_s < wait_s:
        return
    why = Reason(reason.code, f"{reason.text}; {state_after(step)} is staged first")
    waiting = {name: ctx.emit(StageStep, why, node=name, step=step) for name in state.group.members}
    state.quiesce = Quiesce(step, waiting, ctx.now_ns, again=before is not None)
    ctx.arm("stage", SLACK_S + 1.5 * wait_s)
    ctx.move(state.phase, why.code, why.text)


def _room_s(ctx: StepContext) -> float | None:
    """Seconds until the first member leaves, which the interruption may wait; None: not known."""
    leaving = leaving_members(ctx.state)
    leave_times = [node.leaves_ns for node in leaving if node.leaves_ns is not None]
    return SHARE * (min(leave_times) - ctx.now_ns) / SECOND_NS if leave_times else None


def answered(ctx: StepContext, action: StageStep, problem: str = "") -> None:
    """A node has staged the step, or cannot: then there is no reason to wait for the others, and
    `prepare` may request another one."""
    quiesce = ctx.state.quiesce
    if quiesce is None or quiesce.waiting.get(action.node) != action.action_id:
        return
    del quiesce.waiting[action.node]
    if problem:
        ctx.note(f"{state_after(action.step)} was not staged by all: {action.node}: {problem}")
        stop_waiting(ctx)
        quiesce.missed = True


def stop_waiting(ctx: StepContext) -> None:
    if ctx.state.quiesce is not None:
        ctx.state.quiesce.waiting.clear()


def end(ctx: StepContext) -> None:
    """The interruption begins, or another one has come first."""
    ctx.state.quiesce = None
    ctx.disarm("stage")


def drop_if_withdrawn(ctx: StepContext) -> None:
    """No request asks for it any more. Workers that wait after the staged step continue."""
    quiesce = ctx.state.quiesce
    if quiesce is not None and quiesce.requested_ns < ctx.now_ns:
        end(ctx)
        text = "training continues: the request that would have interrupted it was withdrawn"
        ctx.move(ctx.state.phase, ctx.state.reason.code, text)
