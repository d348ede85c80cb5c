"""Placing and launching: usable nodes -> members, restore point -> the next generation.

Owns: the wait for nodes and the launch. Must not: say why the last generation ended.
"""

from __future__ import annotations

from ..protocol.facts import Membership, Restore
from . import provisioning
from .actions import LaunchGroup, Reason
from .checkpoints import choose_restore
from .completion import end_early, end_parking
from .context import StepContext
from .events import StepCompleted
from .nodes import any_to_be_freed, awaiting_rejoin, full_size, possible_size, usable
from .rank_assignment import (
    assign,
    buddies,
    mesh_for,
    nodes_per_group,
    order_newcomers,
    persist_cadence,
    seats_for,
)
from .state import IncidentRecord, JobState

LAUNCH_TIMEOUT_S = 15.0
"""A fork takes milliseconds; after this a launch is said again, and after twice this it failed."""
MESHES_KEPT = 16
FALLBACK_PORT = 29500


def place(turn: StepContext) -> None:
    """Launch now, or wait for nodes and say so."""
    state = turn.state
    if not state.placing or state.intent != "run":
        return
    full, possible = full_size(state), possible_size(state)
    if possible:
        turn.disarm("capacity")
    if possible and possible == full:
        _launch(turn, possible)
    elif awaiting_rejoin(state):
        return
    elif state.phase == "recovering":
        if provisioning.worth_a_wait(turn) or (not possible and provisioning.may_wait(turn)):
            return
        if possible:
            _launch(turn, possible)
        else:
            _wait(turn)
    elif not possible:
        turn.disarm("gather")
        _wait(turn)
    else:
        turn.arm_once("gather", state.job.spec.recovery.grow_delay_s)
        if turn.due("gather") or not (state.expected_nodes or any_to_be_freed(state)):
            _launch(turn, possible)


def _wait(turn: StepContext) -> None:
    state, limit = turn.state, turn.state.job.spec.recovery.capacity_timeout_s
    here, wanted = len(usable(state)), state.min_nodes
    room = f"; {state.why_no_room or 'the backend had no room'}" if state.no_room else ""
    what = (
        f"{here} usable, {wanted} needed at least, "
        f"{state.expected_nodes} on their way{room}{provisioning.why_none_comes(state)}"
    )
    turn.move("pending", "capacity", f"waiting for nodes: {what}")
    if limit is None:
        return
    turn.arm_once("capacity", limit)
    if turn.due("capacity"):
        text = f"recovery.capacityTimeoutSeconds: waited {limit:g} s for nodes: {what}"
        end_early(turn, "failed", "capacity", text)


def _launch(turn: StepContext, size: int) -> None:
    state, spec = turn.state, turn.state.job.spec
    mesh = mesh_for(state.job, size)
    assert mesh is not None
    free = order_newcomers((n.name, n.facts, n.sequence) for n in usable(state))
    group = nodes_per_group(mesh, spec.workers_per_node)
    group = group if size % group == 0 else size
    before, members = state.members, assign(state.members, free, size, group)
    restore = choose_restore(state)
    state.generation += 1
    first = state.nodes[members[0]]
    membership = Membership(
        generation=state.generation,
        mesh=mesh,
        num_nodes=size,
        workers_per_node=spec.workers_per_node,
        master_address=first.facts.address,
        master_port=first.offered_port or FALLBACK_PORT + state.generation % 1000,
        restart_count=state.launches,
        restore=restore,
    )
    decision = _describe(state, before, members, restore)
    if len(members) < len(before):
        decision += provisioning.why_no_wait(turn)
    _begin_generation(turn, membership, members, restore)
    seats = seats_for(mesh, size, spec.workers_per_node)
    facts = {name: state.nodes[name].facts for name in members}
    buddy_of = buddies(state.job, mesh, members, facts)
    code = state.reason.code
    for node_rank, name in enumerate(members):
        action_id = turn.emit(
            LaunchGroup,
            Reason(code, decision),
            node=name,
            node_rank=node_rank,
            membership=membership,
            seats=seats[node_rank],
            buddy=buddy_of.get(name, ""),
            persist_every_steps=persist_cadence(state.job),
        )
        action = state.inflight[action_id]
        assert isinstance(action, LaunchGroup)
        state.launch[name], state.launching[name] = action, action_id
        state.nodes[name].generation = state.generation
    if state.phase == "pending":
        turn.move("starting", code, decision)
    else:
        turn.move(state.phase, code, decision)
    _fill_incident(turn, state.incident, membership, decision)


def _begin_generation(
    turn: StepContext, membership: Membership, members: tuple[str, ...], restore: Restore | None
) -> None:
    state = turn.state
    end_parking(turn)
    state.launches += 1
    state.membership, state.members = membership, members
    state.meshes[state.generation] = membership.mesh
    held = {shard.generation for node in state.nodes.values() for shard in node.staged}
    for old in [g for g in state.meshes if g <= state.generation - MESHES_KEPT]:
        if old not in held:  # what memory holds may have to be written yet
            del state.meshes[old]
    state.launch, state.launching, state.exits = {}, {}, {}
    state.active, state.placing, state.stepped = True, False, False
    state.step = restore.step if restore else -1
    state.launched_ns = turn.now
    state.resized = state.resized and len(members) != full_size(state)
    turn.disarm("gather", "replacement", "grow", "preempt", "cadence", "launch-again")
    turn.arm("launch", LAUNCH_TIMEOUT_S)
    left_s, state.deadline_left_s = state.deadline_left_s, None
    deadline_s = state.job.spec.active_deadline_s if left_s is None else left_s
    if deadline_s is not None:
        turn.arm_once("deadline", deadline_s)


def _nodes(count: int) -> str:
    return f"{count} nodes" if count != 1 else "1 node"


def _same(count: int) -> str:
    return f"the same {_nodes(count)}" if count != 1 else "the same node"


def _describe(
    state: JobState, before: tuple[str, ...], after: tuple[str, ...], restore: Restore | None
) -> str:
    """What is done, in one sentence."""
    new = [name for name in after if name not in before]
    out = [name for name in before if name not in after]
    if not before:
        what = f"launch on {_nodes(len(after))}"
    elif len(after) < len(before):
        what = f"shrink from {len(before)} to {_nodes(len(after))}"
    elif len(after) > len(before):
        what = f"grow from {len(before)} to {_nodes(len(after))}"
    elif out:
        what = f"{', '.join(new)} in the place of {', '.join(out)}"
    else:
        what = f"restart on {_same(len(after))}"
    if restore is None and state.job.spec.entrypoint.recipe is None:
        # A script may have a checkpoint of its own, which only it knows.
        return f"{what}; Holdfast has no state to restore" if before else what
    if restore is None:
        return f"{what}, from the beginning"
    tier = "storage" if restore.directory else "memory"
    return f"{what}, from {tier} after step {restore.step}"


def _fill_incident(
    turn: StepContext, incident: IncidentRecord | None, membership: Membership, decision: str
) -> None:
    if incident is None or incident.generation_after is not None:
        return
    restore = membership.restore
    incident.decision = decision
    incident.generation_after = membership.generation
    incident.world_size_after = membership.world_size
    incident.resumed_after_step = restore.step if restore else -1
    incident.launched_ns = turn.now
    if restore is None:
        incident.restored_from = "nothing"
    else:
        incident.restored_from = "storage" if restore.directory else "memory"


# -- the launch's results ---------------------------------------------------------------------
def launched(turn: StepContext, action: LaunchGroup) -> None:
    state = turn.state
    if state.launching.get(action.node) == action.action_id:
        del state.launching[action.node]
    all_launched(turn)


def all_launched(turn: StepContext) -> None:
    """Once every node has started its workers; a script's progress is unknown, so it runs now."""
    state = turn.state
    if state.launching or not state.active or state.stop is not None:
        return
    turn.disarm("launch", "launch-again")
    incident = state.incident
    if incident is not None and incident.started_ns is None:
        incident.started_ns = turn.now
    if state.job.spec.entrypoint.recipe is None and state.phase in ("starting", "recovering"):
        where = _nodes(len(state.members))
        turn.move("running", state.reason.code, f"all workers run, on {where}")


def say_again(turn: StepContext) -> None:
    """Nodes that have not answered a launch."""
    turn.disarm("launch")
    turn.arm("launch-again", LAUNCH_TIMEOUT_S)
    for name in list(turn.state.launching):
        reason = Reason("infrastructure", f"{name} has not answered in {LAUNCH_TIMEOUT_S:g} s")
        turn.state.launching[name] = turn.emit_again(turn.state.launch[name], reason)


def advanced(turn: StepContext, event: StepCompleted) -> None:
    """All ranks have finished a step: the first one ends the start-up."""
    state = turn.state
    if event.generation != state.generation or not state.active:
        return
    state.step = max(state.step, event.step)
    if state.stepped:
        return
    state.stepped, state.stepped_ns = True, turn.now
    every_s = state.job.spec.checkpoint.storage.every_s
    if every_s is not None:
        turn.arm("cadence", every_s)
    incident = state.incident
    if incident is not None:
        incident.first_step_ns = turn.now
    if state.stop is None and state.phase in ("starting", "recovering"):
        size = state.membership.world_size if state.membership else 0
        turn.move("running", state.reason.code, f"all {size} ranks have finished step {event.step}")
