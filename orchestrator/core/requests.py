"""Requests of users to a running job (resize, adjust, again, suspend, resume, cancel), and the
planned interruptions that follow from them or from a preemption notice."""

from __future__ import annotations

from .. import limits
from ..api.v1alpha1 import Recovery
from . import (
    completion,
    joining,
    launching,
    nodes,
    own_checkpoints,
    provisioning,
    quiesce,
    recovery,
)
from .actions import Reason
from .context import SECOND_NS, StepContext
from .events import (
    AdjustRequested,
    AgainRequested,
    CancelRequested,
    ResizeRequested,
    ResumeRequested,
    SuspendRequested,
)
from .rank_assignment import check_resize, resized
from .roster import NodeRecord
from .state import PURPOSE_CODE, Cause, DrainKind, JobState
from .transitions import JobPhase

TRAINING: tuple[JobPhase, ...] = ("starting", "recovering", "running")
LEAVE_SHARE = 1 / 3
"""The share of a leaving node's remaining time in which training continues while its replacement
starts. The rest is for the hand-over, and for storage if no node can take over."""

MAX_NAMED = 3
"""Nodes in a sentence."""


# -- requests ---------------------------------------------------------------------------------
def resize(ctx: StepContext, event: ResizeRequested) -> None:
    state = ctx.state
    if problem := resize_problem(state, event.nodes):
        ctx.note(problem)
        return
    launching.request_size(state, event.nodes)
    ctx.replace_job(resized(state.job, event.nodes))


def resize_problem(state: JobState, num_nodes: int) -> str:
    """Problem of a requested size of a running job; empty: none."""
    problem = check_resize(state.job, num_nodes, state.worker_memory)
    world = num_nodes * state.job.spec.workers_per_node
    if problem or state.sizes.allows(world):
        return problem
    why = state.sizes.refused.get(world, "only sizes that worked are tried any more")
    good = " or ".join(str(size) for size in sorted(state.sizes.worked))
    return f"nodes: got {num_nodes}, which is {world} workers; expected {good} workers: {why}"


def adjust(ctx: StepContext, event: AdjustRequested) -> None:
    """The new values count from their next use: a wait that is under way keeps its length."""
    state = ctx.state
    recovery = Recovery.model_validate(event.recovery)
    spec = state.job.spec
    # The size is a request of its own; rank_assignment.resized has the same rule.
    low = min(event.min_nodes, spec.nodes.max)
    changed = spec.nodes.model_copy(update={"min": low, "spares": event.spares})
    elasticity = spec.elasticity if event.elasticity is None else event.elasticity
    updates = {"nodes": changed, "recovery": recovery, "elasticity": elasticity}
    ctx.replace_job(state.job.model_copy(update={"spec": spec.model_copy(update=updates)}))


def again(ctx: StepContext, event: AgainRequested) -> None:
    """Start edited code, and drop what was learned of the old code."""
    state = ctx.state
    if event.code is not None:
        spec = state.job.spec.model_copy(update={"code": event.code or None})
        ctx.replace_job(state.job.model_copy(update={"spec": spec}))
    launching.request_code(state)
    recovery.forget_places(state)
    state.sizes.failed.clear()
    state.sizes.refused.clear()
    ctx.note(_requested("new code", event.by))


def suspend(ctx: StepContext, event: SuspendRequested) -> None:
    state = ctx.state
    if state.phase == "finishing":
        ctx.note("suspend: the job is finishing already")
    elif state.intent == "run":
        ctx.want("suspend", _requested("suspend", event.by))


def resume(ctx: StepContext, event: ResumeRequested) -> None:
    state = ctx.state
    if state.intent != "suspend":
        return
    if state.hold is not None:  # placement decides again
        if state.hold.ignored:
            own_checkpoints.resumed(ctx, start_over=event.start_over)
        else:
            state.catalog.start_over = event.start_over
    ctx.want("run")


def cancel(ctx: StepContext, event: CancelRequested) -> None:
    """A second request does not wait for a staged step or for storage."""
    state = ctx.state
    if state.intent == "cancel":
        quiesce.stop_waiting(ctx)
    if state.termination_reason is not None:
        completion.end_now(ctx, _requested("cancel", event.by))
    else:
        ctx.want("cancel", _requested("cancel", event.by))


def deadline_passed(ctx: StepContext) -> None:
    """A suspended job finds it due when it is resumed."""
    if ctx.state.intent != "run":
        return
    ctx.disarm("deadline")
    limit = ctx.state.job.spec.active_deadline_s
    ctx.want("deadline", f"the job has run for its activeDeadlineSeconds of {limit:g} s")


def _requested(what: str, by: str) -> str:
    return f"{what} requested" + (f" by {by}" if by else "")


# -- following the intent ---------------------------------------------------------------------
def follow_intent(ctx: StepContext) -> None:
    """Reconciler. Suspend, cancel or the deadline: stop what runs, then suspend or end the job."""
    state = ctx.state
    if state.intent == "run":
        if state.phase == "suspended":
            ctx.move("pending", "resume", "resumed; waiting for nodes")
            ctx.place()
        elif state.runs and _all_done(state):
            text = f"all {len(state.group.exits)} workers ended with exit code 0"
            recovery.interrupt(ctx, Cause("finish", Reason("finish", text)))
        return
    reason = Reason(PURPOSE_CODE[state.intent], state.intent_reason)
    if state.group.active:
        recovery.interrupt(ctx, Cause(state.intent, reason))
    elif state.termination_reason is not None:
        return
    elif state.intent in ("cancel", "deadline"):
        completion.end_early(ctx, "failed" if state.intent == "deadline" else "cancelled", reason)
    elif state.phase != "suspended" and (
        state.drain is None or state.drain.kind == DrainKind.AT_RISK
    ):
        completion.suspend(ctx)


def _all_done(state: JobState) -> bool:
    assert state.group.membership is not None
    done = len(state.group.exits) == state.group.membership.world_size
    return done and all(e.code == 0 for _n, e in state.group.exits.values())


# -- planned interruptions --------------------------------------------------------------------
def interrupt_if_planned(ctx: StepContext) -> None:
    """Reconciler. Another size is wanted, or a member will be preempted."""
    state = ctx.state
    if state.phase not in TRAINING or not state.group.active or state.stop is not None:
        return
    leaving = nodes.leaving_members(state)
    if state.phase != "running" and not leaving and not state.new_code:
        return
    size, full = len(state.group.members), provisioning.full_size(state)
    possible = nodes.possible_size(state)
    if leaving:
        _replace_leaving_nodes(ctx, leaving, possible, min(size, full))
    elif state.new_code:
        recovery.interrupt(ctx, Cause("new-code", Reason("new-code", "new code was requested")))
    elif size > full:
        text = f"from {size} to {full} nodes, as requested"
        recovery.interrupt(ctx, Cause("resize", Reason("resize", text)))
    elif possible > size:
        ctx.arm_once("grow", state.job.spec.recovery.grow_delay_s)
        if ctx.due("grow") or (state.resize_pending and possible == full):
            _grow(ctx, f"{possible} nodes are usable, {size} are used")
    else:
        if "standbys" in state.timers:
            ctx.move(state.phase, "resize", "training continues on the nodes that it has")
        ctx.disarm("grow", "standbys")
        joining.drop(ctx)


def _grow(ctx: StepContext, text: str) -> None:
    """Training would stand still while workers import what standbys of new nodes can import."""
    state, limit_s = ctx.state, limits.STANDBYS_WAIT_S
    without = state.nodes.in_order(state.nodes.without_standbys)
    late = [node.name for node in nodes.usable(state, without)]
    if late and state.quiesce is None:
        named = ", ".join(late[:MAX_NAMED]) + (", ..." if len(late) > MAX_NAMED else "")
        ctx.arm_once("standbys", limit_s)
        if not ctx.due("standbys"):
            text += (
                f"; the job grows when the standbys of {named} have imported what the script "
                f"imports, or after {limit_s:g} s"
            )
            ctx.move(state.phase, "resize", text)
            return
        text += f"; the standbys of {named} have not imported everything after {limit_s:g} s"
    if grows := joining.ready(ctx, nodes.possible_size(state), text):
        recovery.interrupt(ctx, Cause("resize", Reason("resize", grows)))


def _replace_leaving_nodes(
    ctx: StepContext, leaving: list[NodeRecord], possible: int, wanted: int
) -> None:
    """Go on without the leaving nodes as soon as others can replace them. Until then training goes
    on with them, but only as long as that is safe."""
    state = ctx.state
    ctx.arm_once("preempt", _patience_s(ctx, leaving))
    hopeless = possible > 0 and state.supply.denied and not state.expected_nodes
    begun = state.quiesce is not None
    if possible >= wanted or hopeless or begun or ctx.due("preempt"):
        names = ", ".join(node.name for node in leaving)
        why = leaving[0].leave_reason
        what = "replaced" if leaving[0].slow else "preempted"
        text = f"{names} will be {what} ({why}); {possible} nodes are usable"
        if possible >= wanted and not ctx.due("preempt"):
            text = joining.ready(ctx, min(possible, wanted), text)
        if not text:
            return
        whys = tuple((node.name, node.leave_reason) for node in leaving)
        recovery.interrupt(ctx, Cause("preemption", Reason("preemption", text), leaving=whys))
    else:
        joining.drop(ctx)


def _patience_s(ctx: StepContext, leaving: list[NodeRecord]) -> float:
    wait_s = ctx.state.job.spec.recovery.replacement_wait_s
    left = [node.leaves_ns - ctx.now_ns for node in leaving if node.leaves_ns is not None]
    return LEAVE_SHARE * min(left) / SECOND_NS if left else wait_s
