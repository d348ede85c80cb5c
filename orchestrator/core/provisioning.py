"""Provisioning: requests for nodes, what the backend has promised, and giving nodes back.

A replacement saves a second restart, so a shrink waits for one, but only for one that can join
before replacementWaitSeconds are over. How long a node takes to start differs by a factor of a
hundred between backends. A backend may know it (on one machine the first nodes wait for torch to
be imported, later ones are forked); otherwise the job's own nodes have shown it.
"""

from __future__ import annotations

from itertools import islice

from .. import limits
from .actions import Reason, ReasonCode, ReleaseNode, RequestNodes
from .checkpoints import unsaved
from .context import SECOND_NS, StepContext, recovery_of, seconds
from .events import ActionSucceeded, LossCause
from .rank_assignment import best_size
from .roster import NodeRecord, PendingNode, Promises
from .state import JobState

REQUEST_RETRY_S = 5.0
RELEASE_RETRY_S = 5.0
RETRY_MIN_S, RETRY_MAX_S = 1.0, 300.0
"""Pauses between requests when nodes end before they join, each twice as long as the one before: a
wrong image or a low memory limit would otherwise create nodes as fast as they fail."""
FAILED_STARTS_KEPT = 2
"""Nodes that ended before they joined and are not released yet: their logs say why."""
START_DURATIONS_KEPT = 8
"""Newest starts that count: the first ones of a job may have pulled images."""


# -- queries ----------------------------------------------------------------------------------
def full_size(state: JobState) -> int:
    """Nodes of the largest generation that the spec allows now."""
    return best_size(state.job, state.target_nodes, state.worker_memory, state.sizes.allows)


def awaiting_rejoin(state: JobState) -> bool:
    """A new controller still waits for nodes to reconnect."""
    return "rejoin" in state.timers


def rejoin_s(state: JobState) -> float:
    """Seconds that nodes may take to reconnect to a new controller."""
    return recovery_of(state.job).heartbeat_timeout_s + limits.REJOIN_ALLOWANCE_S


def num_missing(state: JobState) -> int:
    """Nodes that are neither here nor promised, whether or not they are requested right now."""
    missing = _wanted(state) - _held(state) - len(state.supply.promised)
    return 0 if _needs_no_nodes(state) else max(0, missing)


def why_none_joins(state: JobState) -> str:
    """Added to the reason of a job that waits for nodes; empty: nothing is known."""
    if not state.supply.failed_starts:
        return ""
    name, detail = next(reversed(state.supply.failed_starts.items()))
    return f"; {name} ended before it joined: {detail}"


def _needs_no_nodes(state: JobState) -> bool:
    return state.intent != "run" or state.phase in ("finishing", "suspending", "suspended")


def _wanted(state: JobState) -> int:
    return state.target_nodes + state.job.spec.nodes.spares


def _held(state: JobState) -> int:
    """Nodes that count towards the wanted size."""
    cordoned = (name for name in state.ledger.cordoned if name in state.nodes)
    return len(state.nodes) - len(dict.fromkeys([*state.nodes.leaving, *cordoned]))


# -- requests ---------------------------------------------------------------------------------
def request_missing(ctx: StepContext) -> None:
    """Request what is missing of the wanted size and its spares."""
    state = ctx.state
    missing = num_missing(state) - (state.expected_nodes - len(state.supply.promised))
    if missing <= 0 or "request" in state.timers:
        return
    held, wanted = _held(state), _wanted(state)
    text = f"{held} of {wanted} nodes have joined, {state.expected_nodes} are pending"
    ctx.emit(
        RequestNodes,
        Reason("capacity" if state.num_launches else "submitted", text),
        count=missing,
        avoid=tuple(state.ledger.cordoned),
    )


def request_granted(ctx: StepContext, action: RequestNodes, event: ActionSucceeded) -> None:
    """The backend has promised nodes; it may not be able to name them yet."""
    state = ctx.state
    state.supply.expected_start_ns = None if event.start_s is None else seconds(event.start_s)
    state.supply.start_limit_s = event.start_limit_s
    names: tuple[str | None, ...] = event.nodes or (None,) * action.count
    for name in names:
        here = name in state.nodes or name in state.supply.released
        is_expected = name is not None and (here or state.supply.promised.named(name))
        if not is_expected:
            state.supply.promised.append(PendingNode(name, ctx.now_ns))
    ctx.arm_once("expect", state.supply.start_limit_s)


def request_failed(ctx: StepContext, action: RequestNodes, detail: str) -> None:
    """The backend has no capacity: request again later, and do not wait for nodes meanwhile."""
    ctx.state.supply.denied, ctx.state.supply.denial = True, detail
    ctx.note(f"a request for {action.count} more nodes was refused: {detail or 'no capacity'}")
    ctx.arm("request", REQUEST_RETRY_S)


def request_unknown(ctx: StepContext) -> None:
    """The nodes may have been promised: those that join in time need not be requested again."""
    ctx.arm("request", rejoin_s(ctx.state))


# -- promised nodes ---------------------------------------------------------------------------
def joined(state: JobState, name: str) -> None:
    """A promised node has joined."""
    state.supply.denied = False
    promise = state.supply.promised.take(name)
    if promise is not None and not promise.recovered:
        state.supply.start_durations_ns.append(state.now_ns - promise.since_ns)
        del state.supply.start_durations_ns[:-START_DURATIONS_KEPT]
    state.supply.num_failed_starts = 0
    state.supply.failed_starts.clear()


def ended_early(ctx: StepContext, name: str, cause: LossCause, detail: str) -> None:
    """A promised node ended before it joined."""
    state = ctx.state
    state.supply.released[name] = f"lost before it joined ({cause})"
    state.supply.promised.take(name)
    state.supply.failed_starts[name] = detail or cause
    if "request" not in state.timers:  # otherwise this failure belongs to a pause that runs already
        state.supply.num_failed_starts += 1
        doubled = 2.0 ** min(state.supply.num_failed_starts - 1, 30)
        ctx.arm("request", min(RETRY_MIN_S * doubled, RETRY_MAX_S))
    surplus = list(state.supply.failed_starts)[:-FAILED_STARTS_KEPT]
    for node in surplus:
        del state.supply.failed_starts[node]
        release(ctx, node, "infrastructure", f"{node} ended before it joined")


def compare(ctx: StepContext, existing: dict[str, None]) -> None:
    """Compare what the backend has with what the state says. A promise without a name is void: if
    its node exists, the backend has named it."""
    state, supply = ctx.state, ctx.state.supply
    supply.promised = Promises(node for node in supply.promised if node.name in existing)
    for name in existing:
        if name in supply.released:
            why = supply.released[name]
            release(ctx, name, "controller-restart", f"{name} was released: {why}")
        elif name not in state.nodes and supply.promised.named(name) is None:
            supply.promised.append(PendingNode(name, ctx.now_ns, recovered=True))
    if supply.promised:
        ctx.arm_once("expect", supply.start_limit_s)


def recall_promised(ctx: StepContext) -> None:
    """Release promised nodes that are not wanted any more: a suspended or smaller job does not wait
    for them, and they would take capacity from others when they start."""
    state = ctx.state
    no_nodes = _needs_no_nodes(state)
    wanted = 0 if no_nodes else _wanted(state)
    surplus = len(state.supply.promised) + _held(state) - wanted
    why = "the job needs no nodes" if no_nodes else f"only {wanted} nodes are wanted now"
    code: ReasonCode = "suspend" if no_nodes else "resize"
    named = (node.name for node in reversed(state.supply.promised) if node.name is not None)
    for name in list(islice(named, max(0, surplus))):
        state.supply.promised.take(name)
        release(ctx, name, code, f"{name} has not joined, and {why}")


def expectation_expired(ctx: StepContext) -> None:
    """Release promised nodes that did not join in time; then they are requested again."""
    state = ctx.state
    ctx.disarm("expect")
    limit = seconds(state.supply.start_limit_s)
    for promise in list(state.supply.promised):
        if ctx.now_ns - promise.since_ns < limit:
            continue
        state.supply.promised.take(promise.name)
        text = f"{promise.name or 'a node'} did not join within {state.supply.start_limit_s:g} s"
        ctx.note(text)
        release(ctx, promise.name, "capacity", text)
    if state.supply.promised:
        state.timers["expect"] = min(node.since_ns for node in state.supply.promised) + limit


def may_wait(ctx: StepContext) -> bool:
    """A node is expected, and replacementWaitSeconds are not over."""
    due_ns = ctx.state.timers.get("replacement")
    return due_ns is not None and due_ns > ctx.now_ns and ctx.state.expected_nodes > 0


def worth_a_wait(ctx: StepContext) -> bool:
    """A node is expected that can join before replacementWaitSeconds are over. As long as nothing
    is known of start times, every promised node counts."""
    state = ctx.state
    times = _start_times(state)
    if not may_wait(ctx) or state.inflight.requests or not times:
        return may_wait(ctx)
    wait_ns = seconds(state.job.spec.recovery.replacement_wait_s)
    # A node that is long overdue (an unschedulable pod, for example) is not expected in time.
    return any(
        p.since_ns + min(times) <= state.timers["replacement"]
        and ctx.now_ns <= p.since_ns + max([*times, *state.supply.start_durations_ns]) + wait_ns
        for p in state.supply.promised
    )


def why_no_wait(ctx: StepContext) -> str:
    """Added to a shrink that did not wait for an expected node; otherwise empty."""
    if not may_wait(ctx) or worth_a_wait(ctx):
        return ""
    least_s = min(_start_times(ctx.state)) / SECOND_NS
    return f", without waiting for a replacement: a node takes {least_s:.1f} s or more to start"


def _start_times(state: JobState) -> list[int]:
    """Start times of nodes, in nanoseconds."""
    expected = state.supply.expected_start_ns
    return state.supply.start_durations_ns if expected is None else [expected]


# -- releasing --------------------------------------------------------------------------------
def release(ctx: StepContext, name: str | None, code: ReasonCode, text: str) -> None:
    """Give a node back. Its name is never used again; a node without a name cannot be released."""
    if name is None:
        return
    ctx.state.nodes.pop(name, None)
    ctx.state.supply.released.setdefault(name, text)
    if name not in ctx.state.inflight.releases:
        ctx.emit(ReleaseNode, Reason(code, text), node=name)


def release_failed(ctx: StepContext, action: ReleaseNode, detail: str) -> None:
    """The node may still exist: try again until it is gone."""
    ctx.note(f"{action.node} was not released ({detail}); trying again")
    ctx.state.supply.unreleased[action.node] = action.reason.text
    ctx.arm_once("release", RELEASE_RETRY_S)


def retry_releases(ctx: StepContext) -> None:
    ctx.disarm("release")
    for name in list(ctx.state.supply.unreleased):
        release(ctx, name, "infrastructure", ctx.state.supply.unreleased.pop(name))


def release_surplus(ctx: StepContext) -> None:
    """Idle nodes that are surplus, cordoned or leaving: other jobs may need their capacity."""
    state = ctx.state
    if state.phase == "suspended":
        for name in list(state.nodes):
            release(ctx, name, "suspend", "the job is suspended")
        return
    settled = _settled(state)
    for node in state.nodes.in_order([*state.nodes.leaving, *state.ledger.cordoned]):
        if not _idle(state, node) or (not settled and _holds_restore_point(state, node)):
            continue
        if node.name in state.ledger.cordoned:
            release(ctx, node.name, "bad-node", state.ledger.cordoned[node.name])
        elif node.preempting:
            release(ctx, node.name, "preemption", f"{node.name} will be preempted and is idle")
    # The next generation may start from the memory of idle nodes: never before its first step.
    if not settled or full_size(state) > len(state.group.members):
        return
    wanted = _wanted(state)
    surplus = _held(state) - wanted  # a leaving node's replacement may still build
    if surplus > 0:
        idle = (node for node in reversed(state.nodes.values()) if _idle(state, node))
        for node in list(islice(idle, surplus)):
            release(ctx, node.name, "capacity", f"{len(state.nodes)} nodes, {wanted} wanted")


def _idle(state: JobState, node: NodeRecord) -> bool:
    return node.confirmed and not state.is_member(node.name)


def _settled(state: JobState) -> bool:
    """The generation trains, and needs no memory of idle nodes. A script is in phase running before
    its workers have restored; its first step shows that they have."""
    restore = state.group.membership.restore if state.group.membership else None
    begun = state.group.first_step_ns or restore is None or restore.directory
    return state.runs and state.phase == "running" and bool(begun)


def _holds_restore_point(state: JobState, node: NodeRecord) -> bool:
    """The next generation may start from this node's memory."""
    if state.group.active or awaiting_rejoin(state):
        return True
    newest = unsaved(state)
    return newest is not None and any((s.step, s.generation) == newest[0] for s in node.staged)
