"""What people want, and planned interruptions: suspend, cancel, deadline, resize, preemption.

Owns: state.intent and the wanted size. Must not: know how a generation is stopped or placed.
"""

from __future__ import annotations

from ..api.v1alpha1 import Recovery
from . import completion, nodes, quiesce, recovery
from .actions import Reason
from .context import SECOND_NS, StepContext
from .events import (
    AdjustRequested,
    CancelRequested,
    ResizeRequested,
    ResumeRequested,
    SuspendRequested,
)
from .rank_assignment import check_resize, resized
from .state import PURPOSE_CODE, JobState, NodeRecord


def resize(ctx: StepContext, event: ResizeRequested) -> None:
    state = ctx.state
    problem = check_resize(state.job, event.nodes)
    if problem:
        ctx.note(problem)
        return
    state.resize_pending = event.nodes != state.target_nodes
    state.job = resized(state.job, event.nodes)


def adjust(ctx: StepContext, event: AdjustRequested) -> None:
    """Read where they matter next: a wait that is under way keeps its length."""
    state = ctx.state
    nodes, limits = state.job.spec.nodes, Recovery.model_validate(event.recovery)
    # The size is a wish of its own; see ranks.resized for the same rule.
    low = min(event.min_nodes, nodes.max)
    changed = nodes.model_copy(update={"min": low, "spares": event.spares})
    spec = state.job.spec.model_copy(update={"nodes": changed, "recovery": limits})
    state.job = state.job.model_copy(update={"spec": spec})


def suspend(ctx: StepContext, event: SuspendRequested) -> None:
    state = ctx.state
    if state.phase == "finishing":
        ctx.note("suspend: the job is finishing already")
    elif state.intent == "run":
        state.intent, state.intent_reason = "suspend", _by("suspend", event.by)


def resume(ctx: StepContext, event: ResumeRequested) -> None:
    if ctx.state.intent == "suspend":
        ctx.state.intent = "run"


def cancel(ctx: StepContext, event: CancelRequested) -> None:
    state = ctx.state
    if state.intent == "cancel":
        quiesce.hurry(ctx)
    if state.termination_reason is not None:
        completion.end_now(ctx, _by("cancel", event.by))
    else:
        state.intent, state.intent_reason = "cancel", _by("cancel", event.by)


def _by(what: str, who: str) -> str:
    return f"{what} was asked for" + (f" by {who}" if who else "")


def follow_intent(ctx: StepContext) -> None:
    """Suspend, cancel or the deadline: end what runs, then the job."""
    state = ctx.state
    if state.intent == "run":
        if state.phase == "suspended":
            ctx.move("pending", "resume", "resumed; waiting for nodes")
            state.needs_placement = True
        elif state.active and state.stop is None and _all_done(state):
            text = f"all {len(state.exits)} workers ended with exit code 0"
            recovery.interrupt(ctx, "finish", Reason("finish", text))
        return
    if state.active:
        if state.stop is None:
            recovery.interrupt(
                ctx, state.intent, Reason(PURPOSE_CODE[state.intent], state.intent_reason)
            )
    elif state.termination_reason is not None:
        return
    elif state.intent == "cancel":
        completion.end_early(ctx, "cancelled", "cancel", state.intent_reason)
    elif state.intent == "deadline":
        completion.end_early(ctx, "failed", "deadline", state.intent_reason)
    elif (state.drain is None or state.drain.kind == "park") and state.phase != "suspended":
        state.needs_placement = False
        completion.start_drain(ctx, "suspend")


def _all_done(state: JobState) -> bool:
    size = state.membership.world_size if state.membership else 0
    return len(state.exits) == size and all(e.code == 0 for _n, e in state.exits.values())


TRAINING = ("starting", "recovering", "running")
LEAVE_SHARE = 1 / 3
"""Of the time that a leaving node has: how long training goes on while its replacement comes. The
rest is for the hand-over, and for storage where nobody can take over."""


def planned(ctx: StepContext) -> None:
    """Another size, or a node that will be taken away: a planned interruption."""
    state = ctx.state
    if state.phase not in TRAINING or not state.active or state.stop is not None:
        return
    size, full = len(state.members), nodes.full_size(state)
    possible = nodes.possible_size(state)
    leaving = [n for n in nodes.members_here(state) if n.preempting]
    if leaving:
        _make_way(ctx, leaving, possible, min(size, full))
    elif state.phase != "running":
        return
    elif size > full:
        text = f"from {size} to {full} nodes, as asked"
        recovery.interrupt(ctx, "resize", Reason("resize", text))
    elif possible > size:
        ctx.arm_once("grow", state.job.spec.recovery.grow_delay_s)
        if ctx.due("grow") or (state.resize_pending and possible == full):
            text = f"{possible} nodes are usable, {size} are used"
            recovery.interrupt(ctx, "resize", Reason("resize", text))
    else:
        ctx.disarm("grow")


def _make_way(ctx: StepContext, leaving: list[NodeRecord], possible: int, wanted: int) -> None:
    """Go on without the leaving nodes as soon as others can take their places. Until then training
    goes on with them, but only as long as it is safe to."""
    state = ctx.state
    ctx.arm_once("preempt", _patience_s(ctx, leaving))
    hopeless = possible > 0 and state.capacity_denied and not state.expected_nodes
    begun = state.quiesce is not None
    if possible >= wanted or hopeless or begun or ctx.due("preempt"):
        names = ", ".join(node.name for node in leaving)
        text = (
            f"{names} will be taken away ({leaving[0].leave_reason}); {possible} nodes are usable"
        )
        stop = recovery.interrupt(ctx, "preemption", Reason("preemption", text))
        if stop is not None:
            stop.leaving = [(node.name, node.leave_reason) for node in leaving]


def _patience_s(ctx: StepContext, leaving: list[NodeRecord]) -> float:
    wait_s = ctx.state.job.spec.recovery.replacement_wait_s
    known = [node.leaves_ns - ctx.now_ns for node in leaving if node.leaves_ns is not None]
    return LEAVE_SHARE * min(known) / SECOND_NS if known else wait_s
