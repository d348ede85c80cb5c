"""Who is in: nodes that join, rejoin, are lost, are wanted or are too many.

It does not start or stop generations; `joined` and `lost` return what is broken.
"""

from __future__ import annotations

from .. import limits
from . import provisioning
from .actions import Reason, ReasonCode, ReleaseNode, RequestNodes, StopGroup
from .checkpoints import in_memory, newest_committed
from .context import StepContext, seconds
from .events import ActionSucceeded, GroupStopped, NodeJoined, NodeLost, PreemptionNoticed
from .rank_assignment import best_size, mesh_for
from .state import JobState, NodeRecord

REQUEST_RETRY_S = 5.0
RELEASE_RETRY_S = 5.0
MAX_DETAIL = 500
"""Characters kept of what a node says of itself."""
REJOIN_ALLOWANCE_S = 5.0
"""On top of the heartbeat timeout: what a new controller gives agents to find it again."""


# -- queries ----------------------------------------------------------------------------------
def usable(state: JobState) -> list[NodeRecord]:
    """Nodes that the next generation may use."""
    members = dict.fromkeys(state.members)
    return [
        node
        for node in state.nodes.values()
        if node.confirmed and not node.preempting and node.name not in state.cordoned
        and (node.generation == 0 or (state.active and node.name in members))
        and node.facts.slots >= state.job.spec.workers_per_node
    ]  # fmt: skip


def members_here(state: JobState) -> list[NodeRecord]:
    """Nodes of the current generation that are not lost."""
    return [state.nodes[name] for name in state.members if name in state.nodes]


def full_size(state: JobState) -> int:
    """Nodes of the largest generation that the job wants."""
    return best_size(lambda n: mesh_for(state.job, n), state.target_nodes)


def possible_size(state: JobState) -> int:
    """Nodes of the largest generation that could be launched now; 0: none."""
    limit = min(state.target_nodes, len(usable(state)))
    size = best_size(lambda n: mesh_for(state.job, n), limit)
    return size if size >= state.min_nodes else 0


def awaiting_rejoin(state: JobState) -> bool:
    """A new controller has not heard of all nodes yet."""
    return "rejoin" in state.timers and not all(n.confirmed for n in state.nodes.values())


def any_to_be_freed(state: JobState) -> bool:
    """A node here is still rid of an old generation."""
    return not state.active and any(node.generation for node in state.nodes.values())


# -- joining ----------------------------------------------------------------------------------
def joined(ctx: StepContext, event: NodeJoined) -> str:
    """Returns what is broken when a member comes back without its workers; empty: nothing is."""
    state = ctx.state
    if event.node in state.released_nodes and event.node not in state.nodes:
        why = state.released_nodes[event.node]
        release(ctx, event.node, "infrastructure", f"{event.node} was given up: {why}")
        return ""
    node = state.nodes.get(event.node)
    if node is None:
        state.num_joined += 1
        node = NodeRecord(event.node, event.facts, state.num_joined)
        state.nodes[event.node] = node
        provisioning.came(state, event.node)
        state.capacity_denied = False
    node.facts, node.staged, node.confirmed = event.facts, event.staged, True
    node.offered_port = event.offered_port or node.offered_port
    node.generation = event.generation
    broken = ""
    if state.active and event.node in state.members:
        broken = _member_rejoined(ctx, node, event)
    elif event.generation:
        _stop_stale(ctx, node)
    if all(known.confirmed for known in state.nodes.values()):
        ctx.disarm("rejoin")
    return broken


def _member_rejoined(ctx: StepContext, node: NodeRecord, event: NodeJoined) -> str:
    """A member of the current generation said Hello again: adopt it, or say what it missed."""
    state = ctx.state
    if state.stop is not None:
        if node.name in state.stop.waiting:
            _stop_again(ctx, node.name)
    elif event.generation == state.generation:
        state.launching.pop(node.name, None)
    elif node.name in state.launching:
        reason = Reason("controller-restart", f"{node.name} may not have heard of its launch")
        state.launching[node.name] = ctx.emit_again(state.launch_actions[node.name], reason)
        node.generation = state.generation
    else:
        return f"{node.name} came back without its workers of generation {state.generation}"
    return ""


def _stop_again(ctx: StepContext, name: str) -> None:
    stop = ctx.state.stop
    assert stop is not None
    reason = Reason("controller-restart", f"{name} may not have heard that it should stop")
    stop.waiting[name] = ctx.emit(
        StopGroup, reason, node=name, grace_s=stop.grace_s, stacks=stop.stacks_wanted
    )


def _stop_stale(ctx: StepContext, node: NodeRecord) -> None:
    text = (
        f"{node.name} still runs generation {node.generation}; the current one is "
        f"{ctx.state.generation}"
    )
    ctx.emit(StopGroup, Reason("infrastructure", text), node.generation, node=node.name)


def stale_stopped(ctx: StepContext, event: GroupStopped) -> None:
    """A node outside the current generation is free now."""
    node = ctx.state.nodes.get(event.node)
    if node is not None and node.generation == event.generation:
        node.generation = 0
        node.staged = event.staged
        node.offered_port = event.offered_port or node.offered_port


# -- losing -----------------------------------------------------------------------------------
def lost(ctx: StepContext, event: NodeLost) -> str:
    """A node is no more, with its workers and its memory. Its backend makes sure that it is so.

    Returns the cause when it was a member of a generation that may run; empty otherwise.
    """
    state = ctx.state
    node = state.nodes.pop(event.node, None)
    if node is None:
        if event.node not in state.released_nodes:
            state.released_nodes[event.node] = f"lost before it joined ({event.cause})"
            detail = event.detail[:MAX_DETAIL] or event.cause
            for name in provisioning.ended_early(ctx, event.node, detail):
                release(ctx, name, "infrastructure", f"{name} ended before it joined")
        return ""
    detail = event.detail or event.cause
    release(ctx, event.node, "infrastructure", f"lost ({event.cause}): {detail}")
    if all(known.confirmed for known in state.nodes.values()):
        ctx.disarm("rejoin")
    if event.node in state.members and state.active:
        return "preempted" if node.preempting else event.cause
    return ""


def rejoin_expired(ctx: StepContext) -> list[NodeLost]:
    """Nodes that a new controller has not heard of in time."""
    ctx.disarm("rejoin")
    detail = f"did not come back within {_rejoin_s(ctx.state):g} s of the controller's start"
    return [
        NodeLost(node=node.name, cause="silent", detail=detail)
        for node in ctx.state.nodes.values()
        if not node.confirmed
    ]


def preemption_noticed(ctx: StepContext, event: PreemptionNoticed) -> None:
    """What is done about it is a planned interruption: wishes.planned."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    if event.grace_s > 0:
        leaves_ns = ctx.now_ns + seconds(event.grace_s)
        if node.leaves_ns is None:
            ctx.disarm("preempt")  # now it is known how long training can go on
        node.leaves_ns = min(node.leaves_ns or leaves_ns, leaves_ns)
    if node.preempting:
        if event.detail and event.detail not in node.leave_reason:
            node.leave_reason = f"{node.leave_reason}; {event.detail}"[:MAX_DETAIL]
        return
    node.preempting, node.leave_reason = True, event.detail[:MAX_DETAIL] or "no detail given"
    grace = f", in {event.grace_s:.0f} s" if event.grace_s > 0 else ""
    ctx.note(f"{event.node} will be taken away{grace}: {node.leave_reason}")


# -- asking and giving back -------------------------------------------------------------------
def release(ctx: StepContext, name: str, code: ReasonCode, text: str) -> None:
    """Give a node back, for good; its name is never used again."""
    ctx.state.nodes.pop(name, None)
    ctx.state.released_nodes.setdefault(name, text)
    for action in ctx.state.inflight.values():
        if isinstance(action, ReleaseNode) and action.node == name:
            return
    ctx.emit(ReleaseNode, Reason(code, text), node=name)


def release_failed(ctx: StepContext, action: ReleaseNode, detail: str) -> None:
    """A node that may still be there: try again until it is gone."""
    ctx.note(f"{action.node} was not released ({detail}); trying again")
    ctx.state.release_pending[action.node] = action.reason.text
    ctx.arm_once("release", RELEASE_RETRY_S)


def release_again(ctx: StepContext) -> None:
    ctx.disarm("release")
    for name in list(ctx.state.release_pending):
        release(ctx, name, "infrastructure", ctx.state.release_pending.pop(name))


def _ends(state: JobState) -> bool:
    """It asks for no nodes: held, or about to be, or over."""
    return state.intent != "run" or state.phase in ("finishing", "suspending", "suspended")


def _wanted(state: JobState) -> int:
    return state.target_nodes + state.job.spec.nodes.spares


def _held(state: JobState) -> int:
    """Nodes that count towards the wanted size."""
    return sum(
        not node.preempting and node.name not in state.cordoned for node in state.nodes.values()
    )


def num_missing(state: JobState) -> int:
    """Nodes that nobody has promised yet, whether they are asked for at this moment or not."""
    missing = _wanted(state) - _held(state) - len(state.pending_nodes)
    return 0 if _ends(state) else max(0, missing)


def request_missing(ctx: StepContext) -> None:
    """Ask for what is missing of the wanted size and its spares."""
    state = ctx.state
    missing = num_missing(state) - (state.expected_nodes - len(state.pending_nodes))
    if missing <= 0 or "request" in state.timers:
        return
    held, wanted = _held(state), _wanted(state)
    text = f"{held} of {wanted} nodes are here, {state.expected_nodes} more on their way"
    ctx.emit(
        RequestNodes,
        Reason("capacity" if state.num_launches else "submitted", text),
        count=missing,
        avoid=tuple(state.cordoned),
    )


def request_granted(ctx: StepContext, action: RequestNodes, event: ActionSucceeded) -> None:
    """Nodes are on their way. The detail has their names; a backend that cannot name them yet is
    taken at its word."""
    state = ctx.state
    state.expected_start_ns = None if event.start_s is None else seconds(event.start_s)
    state.start_limit_s = event.start_limit_s
    names = event.detail.split() or [
        f"?{action.action_id}.{index}" for index in range(action.count)
    ]
    for name in names:
        if name not in state.nodes and name not in state.released_nodes:
            state.pending_nodes.setdefault(name, ctx.now_ns)
    ctx.arm_once("expect", state.start_limit_s)


def recall_promised(ctx: StepContext) -> None:
    """Promised nodes that nobody wants any more: a held or smaller job does not wait for them, and
    they would take room from others when they come."""
    state = ctx.state
    ends = _ends(state)
    wanted = 0 if ends else _wanted(state)
    surplus = len(state.pending_nodes) + _held(state) - wanted
    why = "the job waits for no nodes" if ends else f"only {wanted} nodes are wanted now"
    for name in reversed([name for name in state.pending_nodes if not name.startswith("?")]):
        if surplus > 0:
            del state.pending_nodes[name]
            release(ctx, name, "suspend" if ends else "resize", f"{name} has not come, and {why}")
            surplus -= 1


def request_failed(ctx: StepContext, action: RequestNodes, detail: str) -> None:
    """No room: try again later, and do not wait for anything."""
    ctx.state.capacity_denied, ctx.state.capacity_detail = True, detail
    ctx.note(f"{action.count} more nodes: {detail or 'no room'}")
    ctx.arm("request", REQUEST_RETRY_S)


def request_unknown(ctx: StepContext) -> None:
    """They may be on their way: those that come in time need not be asked for again."""
    ctx.arm("request", _rejoin_s(ctx.state))


def expectation_expired(ctx: StepContext) -> None:
    """Promised nodes that have not come for very long: give them back, then ask again."""
    state = ctx.state
    ctx.disarm("expect")
    limit = seconds(state.start_limit_s)
    for name, since in list(state.pending_nodes.items()):
        if ctx.now_ns - since < limit:
            continue
        del state.pending_nodes[name]
        text = f"{name} did not come in {state.start_limit_s:g} s"
        ctx.note(text)
        if not name.startswith("?"):
            release(ctx, name, "capacity", text)
    if state.pending_nodes:
        state.timers["expect"] = min(state.pending_nodes.values()) + limit


def release_surplus(ctx: StepContext) -> None:
    """Idle nodes that are too many, cordoned or drained: others may wait for the room they hold."""
    state = ctx.state
    if state.phase == "suspended":
        # Those on their way, too: what comes to a suspended job would hold room for nothing.
        promised = [name for name in state.pending_nodes if not name.startswith("?")]
        for name in [*state.nodes, *promised]:
            state.pending_nodes.pop(name, None)
            release(ctx, name, "suspend", "the job is suspended")
        return
    members = dict.fromkeys(state.members if state.active else ())
    idle = [
        node for node in state.nodes.values()
        if node.name not in members and node.confirmed
    ]  # fmt: skip
    settled = state.active and state.stop is None and state.phase == "running"
    for node in idle:
        if node.name in state.cordoned and (settled or not _needed(state, node)):
            release(ctx, node.name, "bad-node", state.cordoned[node.name])
        elif node.preempting and (settled or not _needed(state, node)):
            release(ctx, node.name, "preemption", f"{node.name} is free to be taken away")
    # Memory of idle nodes may be what the next generation starts from: never before a first step.
    if not settled or full_size(state) > len(state.members):
        return
    surplus = len(state.nodes) - (wanted := _wanted(state))
    for node in reversed(idle):
        if surplus > 0 and node.name in state.nodes:
            release(ctx, node.name, "capacity", f"{len(state.nodes)} nodes, {wanted} wanted")
            surplus -= 1


def _needed(state: JobState, node: NodeRecord) -> bool:
    """While nothing runs: whether the next generation may begin from this node's memory."""
    if state.active or awaiting_rejoin(state):
        return True
    newest, committed = next(iter(in_memory(state)), None), newest_committed(state)
    if newest is None or (committed is not None and committed.step >= newest[0][0]):
        return False
    return any((s.step, s.generation) == newest[0] for s in node.staged)


def controller_started(ctx: StepContext, existing: tuple[str, ...] | None) -> list[NodeLost]:
    """What ran under the last controller must be observed anew. Returns the nodes that are gone.

    `existing` are the nodes that the backend has, None where it was not asked."""
    state = ctx.state
    asked = any(isinstance(action, RequestNodes) for action in state.inflight.values())
    releases = [a for a in state.inflight.values() if isinstance(a, ReleaseNode)]
    # Launches, stops and the like are said again as each node comes back; see joined().
    state.inflight.clear()
    for action in releases:
        release(ctx, action.node, action.reason.code, action.reason.text)
    if existing is None and asked:
        request_unknown(ctx)
    for node in state.nodes.values():
        node.confirmed = False
    if state.nodes:
        ctx.arm("rejoin", _rejoin_s(state))
    if state.launching:
        ctx.disarm("launch-again")
        ctx.arm("launch", _rejoin_s(state))
    if state.stop is not None:
        ctx.arm("stop", _rejoin_s(state) + limits.STOP_TIMEOUT_S + state.stop.grace_s)
    return _compare(ctx, existing) if existing is not None else []


def _compare(ctx: StepContext, existing: tuple[str, ...]) -> list[NodeLost]:
    """What the backend has against what we know."""
    state = ctx.state
    for name in list(state.pending_nodes):
        if name not in existing:
            del state.pending_nodes[name]
    for name in existing:
        if name in state.released_nodes:
            release(
                ctx,
                name,
                "controller-restart",
                f"{name} was given up: {state.released_nodes[name]}",
            )
        elif name not in state.nodes and name not in state.pending_nodes:
            state.pending_nodes[name], state.recovered_pending[name] = ctx.now_ns, None
    if state.pending_nodes:
        ctx.arm_once("expect", state.start_limit_s)
    detail = "ended while there was no controller"
    return [
        NodeLost(node=name, cause="gone", detail=detail)
        for name in state.nodes
        if name not in existing
    ]


def _rejoin_s(state: JobState) -> float:
    return state.job.spec.recovery.heartbeat_timeout_s + REJOIN_ALLOWANCE_S
