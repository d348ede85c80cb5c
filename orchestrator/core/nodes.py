"""Who is in: nodes that join, rejoin, are lost, are wanted or are too many.

Owns: state.nodes, state.gone and the requests for nodes. Must not: begin or end generations, beyond
saying that one is broken.
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
def joined(turn: StepContext, event: NodeJoined) -> str:
    """Returns what is broken when a member comes back without its workers; empty: nothing is."""
    state = turn.state
    if event.node in state.gone and event.node not in state.nodes:
        why = state.gone[event.node]
        release(turn, event.node, "infrastructure", f"{event.node} was given up: {why}")
        return ""
    node = state.nodes.get(event.node)
    if node is None:
        state.sequence += 1
        node = NodeRecord(event.node, event.facts, state.sequence)
        state.nodes[event.node] = node
        provisioning.came(state, event.node)
        state.no_room = False
    node.facts, node.staged, node.confirmed = event.facts, event.staged, True
    node.offered_port = event.offered_port or node.offered_port
    node.generation = event.generation
    broken = ""
    if state.active and event.node in state.members:
        broken = _member_rejoined(turn, node, event)
    elif event.generation:
        _stop_stale(turn, node)
    if all(known.confirmed for known in state.nodes.values()):
        turn.disarm("rejoin")
    return broken


def _member_rejoined(turn: StepContext, node: NodeRecord, event: NodeJoined) -> str:
    """A member of the current generation said Hello again: adopt it, or say what it missed."""
    state = turn.state
    if state.stop is not None:
        if node.name in state.stop.waiting:
            _stop_again(turn, node.name)
    elif event.generation == state.generation:
        state.launching.pop(node.name, None)
    elif node.name in state.launching:
        reason = Reason("controller-restart", f"{node.name} may not have heard of its launch")
        state.launching[node.name] = turn.emit_again(state.launch[node.name], reason)
        node.generation = state.generation
    else:
        return f"{node.name} came back without its workers of generation {state.generation}"
    return ""


def _stop_again(turn: StepContext, name: str) -> None:
    stop = turn.state.stop
    assert stop is not None
    reason = Reason("controller-restart", f"{name} may not have heard that it should stop")
    stop.waiting[name] = turn.emit(
        StopGroup, reason, node=name, grace_s=stop.grace_s, stacks=stop.stacks_wanted
    )


def _stop_stale(turn: StepContext, node: NodeRecord) -> None:
    text = (
        f"{node.name} still runs generation {node.generation}; the current one is "
        f"{turn.state.generation}"
    )
    turn.emit(StopGroup, Reason("infrastructure", text), node.generation, node=node.name)


def stale_stopped(turn: StepContext, event: GroupStopped) -> None:
    """A node outside the current generation is free now."""
    node = turn.state.nodes.get(event.node)
    if node is not None and node.generation == event.generation:
        node.generation = 0
        node.staged = event.staged
        node.offered_port = event.offered_port or node.offered_port


# -- losing -----------------------------------------------------------------------------------
def lost(turn: StepContext, event: NodeLost) -> str:
    """A node is no more, with its workers and its memory. Its backend makes sure that it is so.

    Returns the cause when it was a member of a generation that may run; empty otherwise.
    """
    state = turn.state
    node = state.nodes.pop(event.node, None)
    if node is None:
        if event.node not in state.gone:
            state.gone[event.node] = f"lost before it joined ({event.cause})"
            detail = event.detail[:MAX_DETAIL] or event.cause
            for name in provisioning.ended_early(turn, event.node, detail):
                release(turn, name, "infrastructure", f"{name} ended before it joined")
        return ""
    detail = event.detail or event.cause
    release(turn, event.node, "infrastructure", f"lost ({event.cause}): {detail}")
    if all(known.confirmed for known in state.nodes.values()):
        turn.disarm("rejoin")
    if event.node in state.members and state.active:
        return "preempted" if node.preempting else event.cause
    return ""


def rejoin_expired(turn: StepContext) -> list[NodeLost]:
    """Nodes that a new controller has not heard of in time."""
    turn.disarm("rejoin")
    detail = f"did not come back within {_rejoin_s(turn.state):g} s of the controller's start"
    return [
        NodeLost(node=node.name, cause="silent", detail=detail)
        for node in turn.state.nodes.values()
        if not node.confirmed
    ]


def preemption_noticed(turn: StepContext, event: PreemptionNoticed) -> None:
    """What is done about it is a planned interruption: wishes.planned."""
    node = turn.state.nodes.get(event.node)
    if node is None:
        return
    if event.grace_s > 0:
        leaves_ns = turn.now + seconds(event.grace_s)
        if node.leaves_ns is None:
            turn.disarm("preempt")  # now it is known how long training can go on
        node.leaves_ns = min(node.leaves_ns or leaves_ns, leaves_ns)
    if node.preempting:
        if event.detail and event.detail not in node.leaving:
            node.leaving = f"{node.leaving}; {event.detail}"[:MAX_DETAIL]
        return
    node.preempting, node.leaving = True, event.detail[:MAX_DETAIL] or "no detail given"
    grace = f", in {event.grace_s:.0f} s" if event.grace_s > 0 else ""
    turn.note(f"{event.node} will be taken away{grace}: {node.leaving}")


# -- asking and giving back -------------------------------------------------------------------
def release(turn: StepContext, name: str, code: ReasonCode, text: str) -> None:
    """Give a node back, for good; its name is never used again."""
    turn.state.nodes.pop(name, None)
    turn.state.gone.setdefault(name, text)
    for action in turn.state.inflight.values():
        if isinstance(action, ReleaseNode) and action.node == name:
            return
    turn.emit(ReleaseNode, Reason(code, text), node=name)


def release_failed(turn: StepContext, action: ReleaseNode, detail: str) -> None:
    """A node that may still be there: try again until it is gone."""
    turn.note(f"{action.node} was not released ({detail}); trying again")
    turn.state.unreleased[action.node] = action.reason.text
    turn.arm_once("release", RELEASE_RETRY_S)


def release_again(turn: StepContext) -> None:
    turn.disarm("release")
    for name in list(turn.state.unreleased):
        release(turn, name, "infrastructure", turn.state.unreleased.pop(name))


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
    missing = _wanted(state) - _held(state) - len(state.coming)
    return 0 if _ends(state) else max(0, missing)


def request_missing(turn: StepContext) -> None:
    """Ask for what is missing of the wanted size and its spares."""
    state = turn.state
    missing = num_missing(state) - (state.expected_nodes - len(state.coming))
    if missing <= 0 or "request" in state.timers:
        return
    held, wanted = _held(state), _wanted(state)
    text = f"{held} of {wanted} nodes are here, {state.expected_nodes} more on their way"
    turn.emit(
        RequestNodes,
        Reason("capacity" if state.launches else "submitted", text),
        count=missing,
        avoid=tuple(state.cordoned),
    )


def request_granted(turn: StepContext, action: RequestNodes, event: ActionSucceeded) -> None:
    """Nodes are on their way. The detail has their names; a backend that cannot name them yet is
    taken at its word."""
    state = turn.state
    state.start_told_ns = None if event.start_s is None else seconds(event.start_s)
    state.start_limit_s = event.start_limit_s
    names = event.detail.split() or [
        f"?{action.action_id}.{index}" for index in range(action.count)
    ]
    for name in names:
        if name not in state.nodes and name not in state.gone:
            state.coming.setdefault(name, turn.now)
    turn.arm_once("expect", state.start_limit_s)


def recall_promised(turn: StepContext) -> None:
    """Promised nodes that nobody wants any more: a held or smaller job does not wait for them, and
    they would take room from others when they come."""
    state = turn.state
    ends = _ends(state)
    wanted = 0 if ends else _wanted(state)
    surplus = len(state.coming) + _held(state) - wanted
    why = "the job waits for no nodes" if ends else f"only {wanted} nodes are wanted now"
    for name in reversed([name for name in state.coming if not name.startswith("?")]):
        if surplus > 0:
            del state.coming[name]
            release(turn, name, "suspend" if ends else "resize", f"{name} has not come, and {why}")
            surplus -= 1


def request_failed(turn: StepContext, action: RequestNodes, detail: str) -> None:
    """No room: try again later, and do not wait for anything."""
    turn.state.no_room, turn.state.why_no_room = True, detail
    turn.note(f"{action.count} more nodes: {detail or 'no room'}")
    turn.arm("request", REQUEST_RETRY_S)


def request_unknown(turn: StepContext) -> None:
    """They may be on their way: those that come in time need not be asked for again."""
    turn.arm("request", _rejoin_s(turn.state))


def expectation_expired(turn: StepContext) -> None:
    """Promised nodes that have not come for very long: give them back, then ask again."""
    state = turn.state
    turn.disarm("expect")
    limit = seconds(state.start_limit_s)
    for name, since in list(state.coming.items()):
        if turn.now - since < limit:
            continue
        del state.coming[name]
        text = f"{name} did not come in {state.start_limit_s:g} s"
        turn.note(text)
        if not name.startswith("?"):
            release(turn, name, "capacity", text)
    if state.coming:
        state.timers["expect"] = min(state.coming.values()) + limit


def release_surplus(turn: StepContext) -> None:
    """Idle nodes that are too many, cordoned or drained: others may wait for the room they hold."""
    state = turn.state
    if state.phase == "suspended":
        # Those on their way, too: what comes to a suspended job would hold room for nothing.
        promised = [name for name in state.coming if not name.startswith("?")]
        for name in [*state.nodes, *promised]:
            state.coming.pop(name, None)
            release(turn, name, "suspend", "the job is suspended")
        return
    members = dict.fromkeys(state.members if state.active else ())
    idle = [
        node for node in state.nodes.values()
        if node.name not in members and node.confirmed
    ]  # fmt: skip
    settled = state.active and state.stop is None and state.phase == "running"
    for node in idle:
        if node.name in state.cordoned and (settled or not _needed(state, node)):
            release(turn, node.name, "bad-node", state.cordoned[node.name])
        elif node.preempting and (settled or not _needed(state, node)):
            release(turn, node.name, "preemption", f"{node.name} is free to be taken away")
    # Memory of idle nodes may be what the next generation starts from: never before a first step.
    if not settled or full_size(state) > len(state.members):
        return
    surplus = len(state.nodes) - (wanted := _wanted(state))
    for node in reversed(idle):
        if surplus > 0 and node.name in state.nodes:
            release(turn, node.name, "capacity", f"{len(state.nodes)} nodes, {wanted} wanted")
            surplus -= 1


def _needed(state: JobState, node: NodeRecord) -> bool:
    """While nothing runs: whether the next generation may begin from this node's memory."""
    if state.active or awaiting_rejoin(state):
        return True
    newest, committed = next(iter(in_memory(state)), None), newest_committed(state)
    if newest is None or (committed is not None and committed.step >= newest[0][0]):
        return False
    return any((s.step, s.generation) == newest[0] for s in node.staged)


def controller_started(turn: StepContext, existing: tuple[str, ...] | None) -> list[NodeLost]:
    """What ran under the last controller must be observed anew. Returns the nodes that are gone.

    `existing` are the nodes that the backend has, None where it was not asked."""
    state = turn.state
    asked = any(isinstance(action, RequestNodes) for action in state.inflight.values())
    releases = [a for a in state.inflight.values() if isinstance(a, ReleaseNode)]
    # Launches, stops and the like are said again as each node comes back; see joined().
    state.inflight.clear()
    for action in releases:
        release(turn, action.node, action.reason.code, action.reason.text)
    if existing is None and asked:
        request_unknown(turn)
    for node in state.nodes.values():
        node.confirmed = False
    if state.nodes:
        turn.arm("rejoin", _rejoin_s(state))
    if state.launching:
        turn.disarm("launch-again")
        turn.arm("launch", _rejoin_s(state))
    if state.stop is not None:
        turn.arm("stop", _rejoin_s(state) + limits.STOP_TIMEOUT_S + state.stop.grace_s)
    return _compare(turn, existing) if existing is not None else []


def _compare(turn: StepContext, existing: tuple[str, ...]) -> list[NodeLost]:
    """What the backend has against what we know."""
    state = turn.state
    for name in list(state.coming):
        if name not in existing:
            del state.coming[name]
    for name in existing:
        if name in state.gone:
            release(turn, name, "controller-restart", f"{name} was given up: {state.gone[name]}")
        elif name not in state.nodes and name not in state.coming:
            state.coming[name], state.found[name] = turn.now, None
    if state.coming:
        turn.arm_once("expect", state.start_limit_s)
    detail = "ended while there was no controller"
    return [
        NodeLost(node=name, cause="gone", detail=detail)
        for name in state.nodes
        if name not in existing
    ]


def _rejoin_s(state: JobState) -> float:
    return state.job.spec.recovery.heartbeat_timeout_s + REJOIN_ALLOWANCE_S
