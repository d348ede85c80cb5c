"""Nodes that join, rejoin, are lost, or will be preempted; provisioning.py requests and releases
them. Nothing here stops a generation: `joined` and `lost` return why it must be."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..protocol.messages import (
    GroupStopped,
    NodeJoined,
    PreemptionNoticed,
    StandbysReported,
)
from . import provisioning
from .actions import Reason, StopGroup
from .context import SECOND_NS, StepContext, seconds, stop_timeout_s
from .events import NodeLost
from .provisioning import release
from .rank_assignment import best_size
from .roster import NodeRecord
from .state import Cause, JobState

MAX_DETAIL = 500
"""Characters kept of what a node says about itself."""


# -- queries ----------------------------------------------------------------------------------
def usable(state: JobState, among: Iterable[NodeRecord] | None = None) -> list[NodeRecord]:
    """Nodes that the next generation may use."""
    return [
        node
        for node in (state.nodes.values() if among is None else among)
        if node.confirmed and not node.preempting and node.name not in state.ledger.cordoned
        and (node.generation == 0 or (state.group.active and state.is_member(node.name)))
        and node.facts.slots >= state.job.spec.workers_per_node
    ]  # fmt: skip


def num_usable(state: JobState) -> int:
    """Number of usable nodes, without a walk over all nodes."""
    slots = state.job.spec.workers_per_node
    generations = (0, state.generation) if state.group.active else (0,)
    cordoned = sum(
        node.confirmed and not node.preempting
        and node.generation in generations and node.facts.slots >= slots
        for node in state.nodes.in_order(state.ledger.cordoned)
    )  # fmt: skip
    return state.nodes.num_ready(slots, generations) - cordoned


def leaving_members(state: JobState) -> list[NodeRecord]:
    """Nodes of the running generation that will be preempted, in the order of their ranks."""
    names = [name for name in state.nodes.leaving if state.is_member(name)]
    names.sort(key=lambda name: state.group.launches[name].node_rank)
    return [state.nodes[name] for name in names]


def possible_size(state: JobState) -> int:
    """Nodes of the largest generation that could be launched now; 0: none."""
    limit = min(state.target_nodes, num_usable(state))
    return best_size(state.job, limit, state.worker_memory, state.sizes.allows)


def any_to_be_stopped(state: JobState) -> bool:
    """A node still has to stop the workers of an old generation."""
    return not state.group.active and state.nodes.num_busy > 0


# -- joining ----------------------------------------------------------------------------------
def joined(ctx: StepContext, name: str, fact: NodeJoined) -> Cause | None:
    """Returns why the generation must end: a member comes back without its workers, or the journal
    does not have the generation that nodes run."""
    state = ctx.state
    if name in state.supply.released and name not in state.nodes:
        why = state.supply.released[name]
        release(ctx, name, "infrastructure", f"{name} was released: {why}")
        return None
    if name not in state.nodes:
        state.num_joined += 1
        state.nodes[name] = NodeRecord(name, fact.facts, state.num_joined)
        provisioning.joined(state, name)
    node = state.nodes.change(
        name,
        facts=fact.facts,
        staged=fact.staged,
        confirmed=True,
        offered_port=fact.offered_port or state.nodes[name].offered_port,
        generation=fact.generation,
    )
    newest = max([fact.generation, *(shard.generation for shard in fact.staged)])
    cause = _journal_is_behind(ctx, newest) if newest > state.generation else None
    if not state.is_member(name):
        if fact.generation:
            text = f"{name} still runs generation {node.generation}, not {state.generation}"
            ctx.emit(StopGroup, Reason("infrastructure", text), node.generation, node=name)
    elif cause is None:
        cause = _member_rejoined(ctx, node, fact)
    if not state.nodes.unconfirmed:
        ctx.disarm("rejoin")
    return cause


def standbys_reported(ctx: StepContext, node: str, fact: StandbysReported) -> None:
    """requests.interrupt_if_planned waits for it."""
    if node in ctx.state.nodes:
        ctx.state.nodes.change(node, standbys_ready=fact.ready)


def _journal_is_behind(ctx: StepContext, newest: int) -> Cause | None:
    """The last controller could not write its journal to the end, on a full disk for example. What
    runs is stopped under its own number, and the next generation gets a higher one."""
    state = ctx.state
    written = state.generation
    ctx.fence(newest)
    if not state.group.active:
        return None
    assert state.group.membership is not None
    state.group.membership = replace(state.group.membership, generation=newest)
    state.meshes[newest] = state.group.membership.mesh  # most likely; checked with each shard
    text = f"nodes run generation {newest}; the newest in the journal is {written}"
    return Cause("failure", Reason("controller-restart", text), journal_behind=text)


def _member_rejoined(ctx: StepContext, node: NodeRecord, fact: NodeJoined) -> Cause | None:
    """A member of the generation has reconnected: adopt it, or send again what it may miss."""
    state = ctx.state
    if state.stop is not None:
        if node.name in (stop := state.stop).waiting:
            why = Reason("controller-restart", f"{node.name} may not have received the stop")
            stop.waiting[node.name] = ctx.emit(
                StopGroup, why, node=node.name, grace_s=stop.grace_s, stacks=stop.stacks_wanted
            )
    elif fact.generation == state.generation:
        state.group.launched(node.name)
    elif node.name in state.group.launching:
        reason = Reason("controller-restart", f"{node.name} may not have received its launch")
        action = state.group.launches[node.name]
        state.group.launch(ctx.reemit(action, reason), action)
        state.nodes.change(node.name, generation=state.generation)
    else:
        text = f"{node.name} rejoined without its workers of generation {state.generation}"
        reason = Reason("infrastructure", text)
        return Cause("failure", reason, launch_failure=(node.name, text))
    return None


def stale_stopped(ctx: StepContext, name: str, fact: GroupStopped) -> None:
    """A node has stopped the workers of an old generation and can be used again."""
    node = ctx.state.nodes.get(name)
    if node is not None and node.generation == fact.generation:
        group_stopped(ctx.state, name, fact)


def group_stopped(state: JobState, name: str, fact: GroupStopped) -> None:
    """No workers run on the node any more."""
    port = fact.offered_port or state.nodes[name].offered_port
    state.nodes.change(name, generation=0, staged=fact.staged, offered_port=port)


# -- losing -----------------------------------------------------------------------------------
def lost(ctx: StepContext, event: NodeLost) -> str:
    """A node is gone, with its workers and its memory; the backend makes sure that it is.

    Returns the cause when it was a member of a generation that may run; otherwise empty.
    """
    state = ctx.state
    node = state.nodes.pop(event.node, None)
    if node is None:
        if event.node not in state.supply.released:
            provisioning.ended_early(ctx, event.node, event.cause, event.detail[:MAX_DETAIL])
        return ""
    detail = event.detail or event.cause
    release(ctx, event.node, "infrastructure", f"lost ({event.cause}): {detail}")
    if not state.nodes.unconfirmed:
        ctx.disarm("rejoin")
    if state.is_member(event.node):
        return "preempted" if node.preempting else event.cause
    return ""


def rejoin_expired(ctx: StepContext) -> list[NodeLost]:
    """Nodes that did not reconnect to a new controller in time."""
    limit_s = provisioning.rejoin_s(ctx.state)
    detail = f"did not reconnect within {limit_s:g} s of the controller's start"
    ago_s, roster = _absence_s(ctx), ctx.state.nodes
    return [
        NodeLost(node=node.name, cause="silent", detail=detail, ago_s=ago_s)
        for node in roster.in_order(roster.unconfirmed)
    ]


def _absence_s(ctx: StepContext) -> float:
    """Seconds since the controller before this one was last there."""
    return (ctx.now_ns - ctx.state.last_controller_ns) / SECOND_NS


def preemption_noticed(ctx: StepContext, name: str, fact: PreemptionNoticed) -> None:
    """Note it; requests.interrupt_if_planned replaces the node."""
    nodes = ctx.state.nodes
    node = nodes.get(name)
    if node is None:
        return
    leaves_ns, reason = node.leaves_ns, fact.detail[:MAX_DETAIL] or "no detail given"
    if fact.grace_s > 0:
        if leaves_ns is None:
            ctx.disarm("preempt")  # its length depends on when the node leaves
        noticed_ns = ctx.now_ns + seconds(fact.grace_s)
        leaves_ns = min(leaves_ns or noticed_ns, noticed_ns)
    if node.preempting:
        more = fact.detail and fact.detail not in node.leave_reason
        reason = f"{node.leave_reason}; {fact.detail}"[:MAX_DETAIL] if more else node.leave_reason
    else:
        grace = f" in {fact.grace_s:.0f} s" if fact.grace_s > 0 else ""
        ctx.note(f"{name} will be preempted{grace}: {reason}")
    nodes.change(name, preempting=True, leave_reason=reason, leaves_ns=leaves_ns)


def replace_slow(ctx: StepContext, name: str, evidence: str) -> None:
    """A spare takes the ranks of a slow node, or of a node that will be preempted."""
    state = ctx.state
    node = state.nodes.get(name)
    spares = [spare for spare in usable(state) if not state.is_member(spare.name)]
    if node is None or not state.is_member(name) or node.preempting:
        return
    if not spares:
        ctx.note(f"{name} is not replaced: there is no spare")
        return
    why = f"it is slow: {evidence}"[:MAX_DETAIL]
    state.nodes.change(name, preempting=True, slow=True, leave_reason=why)


# -- a new controller -------------------------------------------------------------------------
def controller_started(ctx: StepContext, existing: tuple[str, ...] | None) -> list[NodeLost]:
    """Expect to observe again what ran under the last controller. Returns the nodes that are gone.

    `existing` are the nodes that the backend has, None where it was not asked."""
    state = ctx.state
    requested, releases = bool(state.inflight.requests), list(state.inflight.releases.values())
    # Launches and stops are sent again when their nodes reconnect; see joined().
    state.inflight.clear()
    for action in releases:
        release(ctx, action.node, action.reason.code, action.reason.text)
    if existing is None and requested:
        provisioning.request_unknown(ctx)
    for name in state.nodes:
        state.nodes.change(name, confirmed=False)
    rejoin_s = provisioning.rejoin_s(state)
    if state.nodes:
        ctx.arm("rejoin", rejoin_s)
    if state.group.launching:
        ctx.disarm("launch-again")
        ctx.arm("launch", rejoin_s)
    if state.stop is not None:
        ctx.arm("stop", rejoin_s + stop_timeout_s(state.job) + state.stop.grace_s)
    if existing is None:
        return []
    provisioning.compare(ctx, here := dict.fromkeys(existing))
    detail = "ended while no controller was running"
    return [
        NodeLost(node=name, cause="gone", detail=detail, ago_s=_absence_s(ctx))
        for name in state.nodes
        if name not in here
    ]
