"""Workers of nodes that join, started beside the running job: they build, try a step without peers
and wait, so that training stands still only until they are connected.

Only where survivors keep their processes. Invariant: the job grows without them when they fail or
take too long.
"""

from __future__ import annotations

from msgspec.structs import replace

from .. import limits
from . import keeping, launching, nodes
from .actions import LaunchGroup, Reason
from .checkpoints import choose_restore
from .context import StepContext
from .rank_assignment import seats_for
from .state import JobState, Joining


def ready(ctx: StepContext, size: int, text: str) -> str:
    """Sentence with which the job grows to `size` nodes; empty: it has to wait."""
    state = ctx.state
    if state.quiesce is not None:
        return text
    begun = _begun(ctx, size, text)
    if begun is None:
        return text
    late = [name for name, action_id in begun.actions.items() if action_id in state.inflight]
    if begun.problem or (late and ctx.due("join")):
        why = begun.problem or f"{late[0]} has not built after {limits.JOIN_WAIT_S:g} s"
        return f"{text}; not all new workers are ready: {why}"
    if late:
        ctx.move(state.phase, "resize", f"{text}; the workers of {late[0]} are built first")
    return "" if late else f"{text}; the new workers are ready"


def _begun(ctx: StepContext, size: int, text: str) -> Joining | None:
    """Workers that build for `size` nodes, begun now if none do; None: none are to build. A second
    rank 0 would write what the first one writes, so it does not build beside it."""
    state, begun = ctx.state, ctx.state.joining
    planned_for = (state.generation, size, nodes.num_usable(state))
    if begun is not None and begun.planned_for == planned_for and _all_usable(state, begun):
        return begun  # a plan costs a pass over all nodes
    mesh, members = launching.plan(state, size)
    if begun is not None and (begun.planned_for[0], begun.members) == (state.generation, members):
        begun.planned_for = planned_for
        return begun
    drop(ctx)
    new = [(at, name) for at, name in enumerate(members) if not state.is_member(name)]
    if not new or new[0][0] == 0 or not keeping.would_keep(state, mesh, members):
        return None
    if restore := choose_restore(state):  # the next generation is not before its step
        restore = replace(restore, sources=())
    begins = launching.membership(state, mesh, members, restore)
    seats = seats_for(mesh, size, state.job.spec.workers_per_node)
    begun = state.joining = Joining(planned_for, members, {})
    for at, name in new:
        begun.actions[name] = ctx.emit(
            LaunchGroup,
            Reason("resize", f"{name} builds beside the running job: {text}"),
            node=name,
            node_rank=at,
            membership=replace(begins, ahead=True),
            seats=seats[at],
            code=state.job.spec.code or "",
        )
    ctx.arm("join", limits.JOIN_WAIT_S)
    return begun


def _all_usable(state: JobState, begun: Joining) -> bool:
    joins = state.nodes.in_order(begun.actions)
    return len(nodes.usable(state, joins)) == len(begun.actions)


def drop(ctx: StepContext) -> None:
    """End the wait: no node is to join any more, or another one."""
    begun, ctx.state.joining = ctx.state.joining, None
    ctx.disarm("join")
    if begun is not None and begun.planned_for[0] == ctx.state.generation:
        ctx.move(ctx.state.phase, "resize", "training continues on the nodes that it has")


def answered(ctx: StepContext, action: LaunchGroup, problem: str = "") -> None:
    """A node's workers wait for their seats, or cannot."""
    begun = ctx.state.joining
    if problem and begun is not None and begun.actions.get(action.node) == action.action_id:
        begun.problem = begun.problem or f"{action.node}: {problem}"
