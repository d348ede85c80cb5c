"""From a fact that something is wrong (or wanted otherwise) to the decision what is done about it.

Owns: interruptions, from the stop of a generation to the verdict: budgets, strikes, fail or go on.
Must not: choose nodes (launching.py) or write checkpoints.
"""

from __future__ import annotations

from .. import limits
from ..api.v1alpha1 import Budget
from ..protocol.facts import Exit, Stack
from . import quiesce
from .actions import Reason, ReasonCode, StopGroup
from .checkpoints import DISTRUST_AFTER, in_memory
from .context import MAX_INCIDENTS, SECOND_NS, StepContext, seconds
from .events import GroupStopped, HeartbeatsLost, HeartbeatsRestored
from .failure import (
    HOPELESS_TYPES,
    Failure,
    FailureEvidence,
    attribute,
    is_failure,
    is_secondary,
    signature,
    when,
)
from .state import FailureClass, IncidentRecord, JobState, PendingStop, Purpose
from .transitions import JobPhase

REHEARSAL_WINDOW_S = 60.0
"""A failure on a node this soon after somebody injected one there is the rehearsed one."""
MAX_USER_ERRORS = 100
# Failures that say nothing about the state that the generation started from.
NOT_THE_STATE = (
    "launch-failed", "preempted", "lost-first", "node-lost", "outside-signal", "hang",
    "device-missing",
)  # fmt: skip
# Failures that say nothing about the machine that showed them.
NOT_THE_NODE = (
    "checkpoint-refused", "checkpoint-damaged", "checkpoint-unreadable", "out-of-memory",
    "network", "unknown",
)  # fmt: skip
# Failures after which the machine is known to be of no use.
NO_SECOND_CHANCE = ("device-missing",)
PHASE_OF: dict[Purpose, JobPhase] = {
    "failure": "recovering", "resize": "recovering", "preemption": "recovering",
    "suspend": "suspending", "cancel": "finishing", "deadline": "finishing",
    "finish": "finishing",
}  # fmt: skip


# -- interrupting -----------------------------------------------------------------------------
def interrupt(
    ctx: StepContext,
    purpose: Purpose,
    reason: Reason,
    *,
    stacks: bool = False,
) -> PendingStop | None:
    """Stop the current generation on all its nodes; None when none runs, or when a step is staged
    before: ask again with every ctx.

    While it is being stopped already, more news joins the interruption that is under way.
    """
    state = ctx.state
    if not state.active:
        return None
    if state.stop is not None:
        return state.stop
    if quiesce.is_awaited(ctx, purpose, reason):
        return None
    quiesce.end(ctx)
    spec = state.job.spec
    planned = purpose not in ("failure", "finish")
    own_loop = spec.entrypoint.recipe is None
    grace_s = spec.recovery.termination_grace_s if planned and own_loop else 0.0
    if purpose == "preemption":
        # Half of what the leaving nodes have: the hand-over comes after it.
        known = [n.leaves_ns for n in state.nodes.values() if n.leaves_ns is not None]
        left_s = (min(known) - ctx.now_ns) / SECOND_NS if known else grace_s
        grace_s = max(0.0, min(grace_s, left_s / 2 if known else left_s))
    stop = PendingStop(purpose, reason, ctx.now_ns, stacks, grace_s)
    state.stop = stop
    if purpose != "finish":
        _open_incident(ctx, purpose, reason)
    ctx.move(PHASE_OF[purpose], reason.code, reason.text)
    state.launching.clear()
    ctx.disarm("grow", "preempt", "launch", "launch-again", "cadence")
    for name in state.members:
        if name in state.nodes:
            stop.waiting[name] = ctx.emit(
                StopGroup, reason, node=name, grace_s=grace_s, stacks=stacks
            )
    allowance = limits.STOP_TIMEOUT_S + grace_s + (limits.STACK_TIMEOUT_S if stacks else 0.0)
    ctx.arm("stop", allowance)
    return stop


def _open_incident(ctx: StepContext, purpose: Purpose, reason: Reason) -> None:
    state = ctx.state
    state.num_incidents += 1
    state.incidents.append(
        IncidentRecord(
            number=state.num_incidents,
            at_ns=ctx.now_ns,
            purpose=purpose,
            generation_before=state.generation,
            world_size_before=state.membership.world_size if state.membership else 0,
            title=reason.text,
            step_before=state.step,
        )
    )
    del state.incidents[:-MAX_INCIDENTS]
    if len(state.incidents) > limits.MAX_INCIDENTS_IN_FULL:
        old = state.incidents[-1 - limits.MAX_INCIDENTS_IN_FULL]
        old.traceback, old.stacks = "", {}


def worker_exited(ctx: StepContext, node: str, exit: Exit) -> None:
    """Note how a worker of the current generation ended; a failure stops the others."""
    state = ctx.state
    if exit.rank in state.exits or not state.active:
        return
    state.exits[exit.rank] = (node, exit)
    if is_failure(exit) and state.stop is None:
        how = f"signal {exit.signal}" if exit.signal is not None else f"exit code {exit.code}"
        text = f"worker {exit.rank} on {node} ended with {how}"
        interrupt(ctx, "failure", Reason("infrastructure", text))


def lost_member(ctx: StepContext, node: str, cause: str, detail: str) -> None:
    """A node of the current generation is no more."""
    state = ctx.state
    first = state.stop is None
    text = f"{node} was lost ({cause}): {detail}"
    stop = interrupt(ctx, "failure", Reason("infrastructure", text))
    assert stop is not None
    stop.lost[node] = (cause, detail)
    stop.lost_first = stop.lost_first or first
    stop.waiting.pop(node, None)
    ctx.arm_once("replacement", state.job.spec.recovery.replacement_wait_s)


def all_silent(ctx: StepContext, event: HeartbeatsLost) -> None:
    """Nothing is done about it: doubt is about ourselves. People should know all the same."""
    whom = f"none of {event.nodes} nodes is" if event.nodes != 1 else "the only node is not"
    _say(
        ctx,
        f"{whom} heard of for {event.seconds:.1f} s: this machine may be starved, or cut off; "
        f"after {event.patience_s:g} s the silence is believed",
    )


def heard_again(ctx: StepContext, event: HeartbeatsRestored) -> None:
    _say(ctx, f"nodes are heard of again, after {event.seconds:.1f} s in which none was")


def _say(ctx: StepContext, text: str) -> None:
    ctx.note(text)
    if ctx.state.phase == "running":
        ctx.move("running", ctx.state.reason.code, text)


def group_stopped(ctx: StepContext, event: GroupStopped) -> None:
    """Nothing of the generation runs on this node any more; this is what is left."""
    state, stop = ctx.state, ctx.state.stop
    assert stop is not None
    stop.waiting.pop(event.node, None)
    node = state.nodes[event.node]
    node.generation = 0
    node.staged = event.staged
    node.offered_port = event.offered_port or node.offered_port
    for exit in event.exits:
        state.exits.setdefault(exit.rank, (event.node, exit))
    stop.stacks.extend(event.stacks)


# -- concluding -------------------------------------------------------------------------------
def conclude(ctx: StepContext) -> str:
    """All nodes have stopped (or are lost). Returns why the job must fail; empty: go on."""
    state, stop = ctx.state, ctx.state.stop
    assert stop is not None and not stop.waiting
    state.stop, state.active = None, False
    ctx.disarm("stop")
    incident = state.incident
    if incident is None or stop.purpose == "finish":
        return ""
    incident.stopped_ns = ctx.now_ns
    steps = [exit.step for _node, exit in state.exits.values()]
    if len(steps) == incident.world_size_before:
        incident.step_before = max(incident.step_before, min(steps))
    # A rank stages a step before it says that it has done it.
    staged = [step for (step, written_by), _ in in_memory(state) if written_by == state.generation]
    incident.step_before = max([incident.step_before, *staged[:1]])
    state.step = max(state.step, incident.step_before)
    suspects = stop.hang[0] if stop.hang is not None else ()
    incident.stacks = _within_bound(stop.stacks, suspects)
    if stop.purpose == "preemption":
        names = ", ".join(node for node, _why in stop.leaving)
        incident.failure_class, incident.rule = "preemption", "preempted"
        incident.title = f"{names} will be taken away"
        incident.evidence = "; ".join(dict.fromkeys(why for _node, why in stop.leaving))
        incident.culprit_node = stop.leaving[0][0] if stop.leaving else ""
        return _charge(ctx, "preemption")
    if stop.purpose != "failure":
        return ""
    return _judge(ctx, stop, incident)


def _within_bound(stacks: list[Stack], suspects: tuple[int, ...]) -> dict[int, str]:
    """By rank. Where they are too many, those are kept that do not wait for their peers, and among
    the others the likeliest suspects."""
    likely = {rank: index for index, rank in enumerate(suspects)}
    room, kept = limits.MAX_INCIDENT_STACK_BYTES, dict[int, None]()
    telling = sorted(stacks, key=lambda s: (s.in_collective, likely.get(s.rank, len(likely))))
    for stack in telling:
        room -= len(stack.text.encode())
        if room >= 0 or not kept:
            kept[stack.rank] = None
    return {stack.rank: stack.text for stack in stacks if stack.rank in kept}


def _judge(ctx: StepContext, stop: PendingStop, incident: IncidentRecord) -> str:
    state = ctx.state
    failure = attribute(
        FailureEvidence(
            exits=tuple(state.exits.values()),
            lost=tuple((node, *why) for node, why in stop.lost.items()),
            lost_first=stop.lost_first,
            hang=stop.hang,
            launch_failure=stop.launch_failure,
            refused=stop.refused,
            leaving=tuple((n.name, n.leave_reason) for n in state.nodes.values() if n.preempting),
            node_of=state.node_of,
            world_size=incident.world_size_before,
        )
    )
    incident.failure_class, incident.rule = failure.failure_class, failure.rule
    incident.title, incident.evidence = failure.title, failure.evidence
    incident.culprit_node, incident.culprit_rank = failure.culprit_node, failure.culprit_rank
    if failure.exit is not None:
        incident.traceback = failure.exit.traceback
    ctx.move(state.phase, _code(failure), failure.title)
    _doubt_the_state(ctx, failure)
    injected = state.injected_faults.pop(failure.culprit_node, None)
    if injected is not None and ctx.now_ns - injected <= seconds(REHEARSAL_WINDOW_S):
        incident.fault_injected = True
        return ""
    _strike(ctx, failure)
    return _same_mistake(ctx, failure) or _charge(ctx, failure.failure_class, failure)


def _code(failure: Failure) -> ReasonCode:
    return "user-error" if failure.failure_class == "user" else failure.failure_class


def _doubt_the_state(ctx: StepContext, failure: Failure) -> None:
    """A state from which generations fail before their first step may be bad itself."""
    state = ctx.state
    restore = state.membership.restore if state.membership else None
    if restore is None or state.first_step_done or failure.rule in NOT_THE_STATE:
        return
    key = (restore.step, restore.generation)
    if not restore.directory:
        weight = DISTRUST_AFTER if failure.damaged else 1
        state.catalog.distrusted[key] = state.catalog.distrusted.get(key, 0) + weight
    elif failure.damaged:
        for known in state.catalog.committed:
            if known.key == key:
                known.refused = True


def _strike(ctx: StepContext, failure: Failure) -> None:
    """Machines that are blamed again and again are not used again."""
    state, node = ctx.state, failure.culprit_node
    if not node or failure.failure_class not in ("infrastructure", "hang"):
        return
    if failure.rule in NOT_THE_NODE:
        return
    window = seconds(state.job.spec.recovery.budgets.infrastructure.window_s)
    recent = [at for at in state.strikes.get(node, []) if ctx.now_ns - at < window] + [ctx.now_ns]
    state.strikes[node] = recent
    hopeless = failure.rule in NO_SECOND_CHANCE
    enough = hopeless or len(recent) >= state.job.spec.recovery.bad_node_strikes
    if enough and node in state.nodes:
        count = f"{len(recent)} incident{'s' if len(recent) != 1 else ''}"
        why = f"cannot be used: {failure.title}" if hopeless else f"was to blame for {count}"
        state.cordoned[node] = f"{node} {why}"
        ctx.note(state.cordoned[node])
        ctx.arm_once("replacement", state.job.spec.recovery.replacement_wait_s)


def _same_mistake(ctx: StepContext, failure: Failure) -> str:
    """Why a restart is no use: the same exception at the same step twice is a bug, not bad luck."""
    state, exit = ctx.state, failure.exit
    if exit is None or not exit.error_type or is_secondary(exit):
        return ""
    if failure.rule not in ("user-exception", "out-of-memory"):
        return ""
    if exit.error_type in HOPELESS_TYPES:
        return f"{exit.error_type} {when(exit)}: {exit.error_message}"
    key = signature(exit)
    count = state.user_errors.get(key, 0) + 1
    state.user_errors[key] = count
    while len(state.user_errors) > MAX_USER_ERRORS:
        del state.user_errors[next(iter(state.user_errors))]
    if count < 2:
        return ""
    return f"the same {exit.error_type} {when(exit)}, twice: {exit.error_message}"


def budget_of(state: JobState, failure_class: FailureClass) -> Budget:
    budget: Budget = getattr(state.job.spec.recovery.budgets, failure_class)
    return budget


def _charge(ctx: StepContext, failure_class: FailureClass, failure: Failure | None = None) -> str:
    """Charge a restart; returns why there can be none."""
    state, budget = ctx.state, budget_of(ctx.state, failure_class)
    window = seconds(budget.window_s)
    recent = [at for at in state.charges.get(failure_class, []) if ctx.now_ns - at < window]
    if len(recent) >= budget.restarts:
        state.charges[failure_class] = recent
        title = failure.title if failure is not None else failure_class
        return (
            f"{title}; the {failure_class} budget is used up: {len(recent)} restarts in the last "
            f"{budget.window_s:g} s, {budget.restarts} allowed"
        )
    state.charges[failure_class] = [*recent, ctx.now_ns]
    state.restarts[failure_class] = state.restarts.get(failure_class, 0) + 1
    return ""
