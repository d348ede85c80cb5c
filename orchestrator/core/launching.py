"""Placement and launch: usable nodes and a restore point become the next generation."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from .. import limits
from ..planner.micro_batch import chosen_micro_batch
from ..planner.refusal import refusal
from ..protocol.facts import Membership, Restore, steps_done
from ..protocol.mesh import Mesh
from . import (
    completion,
    drain,
    host_memory,
    keeping,
    own_checkpoints,
    provisioning,
    staging_interval,
)
from .actions import LaunchGroup, Reason
from .checkpoints import choose_restore, must_not_begin, why_nothing_usable
from .context import StepContext, seconds
from .events import CollectivesBegun, StepCompleted
from .nodes import any_to_be_stopped, num_usable, possible_size, usable
from .provisioning import awaiting_rejoin, full_size
from .rank_assignment import (
    assign,
    best_size,
    buddies,
    mesh_for,
    nodes_per_group,
    order_newcomers,
    persist_cadence,
    seats_for,
)
from .roster import NodeRecord
from .sizes import describe_elasticity
from .state import LAUNCH, PLACEMENT, PLANNED, Group, IncidentRecord, JobState

Plan = tuple[Mesh, tuple[str, ...]]
MESHES_KEPT = 16
FALLBACK_PORT = 29500


# -- placement --------------------------------------------------------------------------------
def place(ctx: StepContext) -> None:
    """Reconciler. Launch the next generation, or wait for nodes."""
    state = ctx.state
    if not state.needs_placement or state.intent != "run":
        return
    if "storage" in state.timers and not ctx.due("storage"):
        return  # the last generation could not read the store
    full, possible = full_size(state), possible_size(state)
    if possible:
        ctx.disarm("capacity")
    if possible and possible == full:
        _launch(ctx, possible)
    elif awaiting_rejoin(state):
        return
    elif state.phase == "recovering":
        if provisioning.worth_a_wait(ctx) or (not possible and provisioning.may_wait(ctx)):
            return
        if possible:
            _launch(ctx, possible)
        else:
            _wait(ctx)
    elif not possible:
        ctx.disarm("gather")
        _wait(ctx)
    else:
        ctx.arm_once("gather", state.job.spec.recovery.grow_delay_s)
        if ctx.due("gather") or not (state.expected_nodes or any_to_be_stopped(state)):
            _launch(ctx, possible)


def _wait(ctx: StepContext) -> None:
    state, limit = ctx.state, ctx.state.job.spec.recovery.capacity_timeout_s
    here, wanted = num_usable(state), state.job.spec.nodes.min
    # A request that is made again after a refusal promises nothing.
    pending = len(state.supply.promised) if state.supply.denied else state.expected_nodes
    denied = f"; {state.supply.denial or 'the backend has no capacity'}"
    what = (
        f"({here} of {wanted} ready, {pending} starting)"
        f"{denied if state.supply.denied else ''}{provisioning.why_none_joins(state)}"
        f"{describe_elasticity(state.job)}{state.sizes.describe()}"
    )
    ctx.move("pending", "capacity", f"waiting for nodes {what}")
    if limit is None:
        return
    ctx.arm_once("capacity", limit)
    if ctx.due("capacity"):
        text = f"recovery.capacityTimeoutSeconds: waited {limit:g} s for nodes {what}"
        completion.end_early(ctx, "failed", Reason("capacity", text))


# -- launch -----------------------------------------------------------------------------------
def _launch(ctx: StepContext, size: int) -> None:
    state, spec = ctx.state, ctx.state.job.spec
    restore = choose_restore(state)
    if restore is None and must_not_begin(state):
        completion.hold(ctx, why_nothing_usable(state))
        return
    whole = _whole(state, restore)
    before, (mesh, members) = state.group.members, whole or plan(state, size)
    memory = state.worker_memory
    if not state.num_launches and (problem := refusal(state.job, size, mesh, memory)):
        completion.end_early(ctx, "failed", Reason("does-not-fit", str(problem)))
        return
    kept_from, why_none = keeping.kept_from(state, mesh, members, restore)
    ctx.fence(state.generation + 1)
    begins = replace(membership(state, mesh, members, restore), kept_from=kept_from)
    decision = _describe(state, before, members, restore)
    decision += keeping.decision(state, begins, members, why_none)
    if whole and len(members) < size:
        decision += "; the others are built beside the running job"
    elif len(members) < len(before):
        decision += provisioning.why_no_wait(ctx)
    _begin_generation(ctx, begins, members)
    reason = Reason(state.reason.code, decision)
    seats = seats_for(mesh, len(members), spec.workers_per_node)
    facts = {name: state.nodes[name].facts for name in members}
    buddy_of = buddies(state.job, mesh, members, facts)
    if state.given_up.copies:
        buddy_of = {}
    hosts = Counter(fact.hostname for fact in facts.values())
    written = state.meshes.get(restore.generation) if restore else None
    own_shards = written is not None and replace(written, replicate=mesh.replicate) == mesh
    for node_rank, name in enumerate(members):
        action_id = ctx.emit(
            LaunchGroup,
            reason,
            node=name,
            node_rank=node_rank,
            membership=begins,
            seats=seats[node_rank],
            buddy=buddy_of.get(name, ""),
            persist_every_steps=persist_cadence(state.job),
            own_shards=own_shards,
            stage_every_steps=staging_interval.at_launch(state),
            code=spec.code or "",
            nodes_on_machine=hosts[facts[name].hostname],
        )
        action = state.inflight[action_id]
        assert isinstance(action, LaunchGroup)
        state.group.launch(action_id, action)
        state.nodes.change(name, generation=state.generation)
    phase = "starting" if state.phase == "pending" else state.phase
    ctx.move(phase, reason.code, decision)
    _fill_incident(ctx, state.incident, begins, decision)


def _whole(state: JobState, restore: Restore | None) -> Plan | None:
    """A launch after a failure, on replicas that kept all their processes, while joining.py builds
    the other workers. None: there are no such replicas, or the job waits for replacements."""
    failed = state.incident is not None and state.incident.purpose == "failure"
    if state.job.spec.recovery.replacement_wait_s or not (failed and state.keeping.reported):
        return None
    all_here = usable(state, state.nodes.in_order(keeping.whole_nodes(state)))
    size = best_size(state.job, len(all_here), state.worker_memory, state.sizes.allows)
    chosen = plan(state, size, all_here) if size else None
    return chosen if chosen and keeping.kept_from(state, *chosen, restore)[0] else None


def plan(state: JobState, size: int, among: list[NodeRecord] | None = None) -> Plan:
    """Mesh and members, by node rank, of a generation of this size. `among`: possible members."""
    mesh = mesh_for(state.job, size, state.worker_memory)
    assert mesh is not None
    free = order_newcomers((n.name, n.facts, n.join_order) for n in usable(state, among))
    group = nodes_per_group(mesh, state.job.spec.workers_per_node)
    group = group if size % group == 0 else size
    return mesh, assign(state.group.members, free, size, group)


def membership(
    state: JobState, mesh: Mesh, members: tuple[str, ...], restore: Restore | None
) -> Membership:
    """The membership of `members`, under the number of the newest generation."""
    first = state.nodes[members[0]]
    return Membership(
        generation=state.generation,
        mesh=mesh,
        num_nodes=len(members),
        workers_per_node=state.job.spec.workers_per_node,
        master_address=first.facts.address,
        master_port=first.offered_port or FALLBACK_PORT + state.generation % 1000,
        restart_count=state.num_launches,
        restore=restore,
        micro_batch=chosen_micro_batch(state.job, mesh, state.worker_memory.device),
    )


def _begin_generation(ctx: StepContext, membership: Membership, members: tuple[str, ...]) -> None:
    state = ctx.state
    keeping.launched(state, membership)
    drain.end(ctx)  # of a state at risk: the new generation takes it over
    state.num_launches += 1
    state.group = Group(membership, members, active=True, launched_ns=ctx.now_ns)
    state.meshes[state.generation] = membership.mesh
    held = {generation for _step, generation, _num_shards in state.nodes.holders}
    for old in [g for g in state.meshes if g <= state.generation - MESHES_KEPT]:
        if old not in held:  # what memory holds may still have to be written
            del state.meshes[old]
    ctx.place(False)
    state.new_code = False
    state.sizes.began = False
    state.step = membership.restore.step if membership.restore else -1
    host_memory.begin_generation(state, members, membership.mesh)
    staging_interval.begin_generation(state)
    state.resize_pending = state.resize_pending and len(members) != full_size(state)
    ctx.disarm(*PLACEMENT, *PLANNED)
    ctx.arm("launch", _launch_timeout_s(state))
    left_s = completion.take_deadline_left_s(state)
    deadline_s = state.job.spec.active_deadline_s if left_s is None else left_s
    if deadline_s is not None:
        ctx.arm_once("deadline", deadline_s)


def request_size(state: JobState, num_nodes: int) -> None:
    state.resize_pending = num_nodes != state.target_nodes


def request_code(state: JobState) -> None:
    state.new_code = True


def reached(state: JobState, step: int) -> None:
    """All ranks have finished this step."""
    state.step = max(state.step, step)


def _nodes(count: int) -> str:
    return f"{count} nodes" if count != 1 else "1 node"


def _describe(
    state: JobState, before: tuple[str, ...], after: tuple[str, ...], restore: Restore | None
) -> str:
    """The decision, in one sentence."""
    old, now = dict.fromkeys(before), dict.fromkeys(after)
    new = [name for name in after if name not in old]
    out = [name for name in before if name not in now]
    if not before:
        what = f"launch on {_nodes(len(after))}"
    elif len(after) < len(before):
        what = f"shrink from {len(before)} to {_nodes(len(after))}"
    elif len(after) > len(before):
        what = f"grow from {len(before)} to {_nodes(len(after))}"
    elif out:
        what = f"{', '.join(new)} replace{'s' if len(new) == 1 else ''} {', '.join(out)}"
    else:
        what = f"restart on the same {_nodes(len(after)).removeprefix('1 ')}"
    if restore is None and state.may_keep_own_checkpoints:
        return f"{what}; {own_checkpoints.describe(state)}" if before else what
    if restore is None:
        lost = any(name not in state.nodes for name in before)
        had = lost or state.nodes.complete() or state.catalog.committed
        why = "no usable state is left" if had else "no complete state was staged yet"
        return f"{what}, from the beginning{f': {why}' if before else ''}"
    tier = "storage" if restore.directory else "memory"
    return f"{what}, from {tier} after {steps_done(restore.step)}"


def _fill_incident(
    ctx: StepContext, incident: IncidentRecord | None, membership: Membership, decision: str
) -> None:
    if incident is None or incident.generation_after is not None:
        return
    restore, counted_by = membership.restore, ctx.state.counted_by
    # One rank alone may need no collective.
    alone = counted_by == "collectives" and membership.world_size == 1
    incident.shows_progress = bool(counted_by) and not alone
    incident.decision = decision
    incident.generation_after = membership.generation
    incident.world_size_after = membership.world_size
    incident.launched_ns = ctx.now_ns
    if restore is None and ctx.state.keeps_own_checkpoints:
        return  # the script restores a checkpoint of its own
    incident.resumed_after_step = restore.step if restore else -1
    # Its write may have ended after the last report, on a node that was lost then.
    incident.step_before = max(incident.step_before, incident.resumed_after_step)
    stored = restore is not None and bool(restore.directory)
    incident.restored_from = "storage" if stored else "memory" if restore else "nothing"


# -- results of the launch --------------------------------------------------------------------
def launched(ctx: StepContext, action: LaunchGroup) -> None:
    if ctx.state.group.launching.get(action.node) == action.action_id:
        ctx.state.group.launched(action.node)
    check_launched(ctx)


def check_launched(ctx: StepContext) -> None:
    """Count a script as running once every node has started its workers: it may report nothing."""
    state = ctx.state
    if state.group.launching or not state.group.active or state.stop is not None:
        return
    ctx.disarm(*LAUNCH)
    if (incident := state.incident) is not None and incident.started_ns is None:
        incident.started_ns = ctx.now_ns
    assert state.group.membership is not None
    alone = state.counted_by == "collectives" and state.group.membership.world_size == 1
    unknown = state.job.spec.entrypoint.recipe is None and not state.counted_by
    if (unknown or alone) and state.phase in ("starting", "recovering"):
        show_running(ctx)


def _launch_timeout_s(state: JobState) -> float:
    """Seconds that a node may take to answer: it may have to import what a script needs."""
    recipe = state.job.spec.entrypoint.recipe
    imports = recipe is None or recipe.config.preload or state.job.spec.preload
    return limits.LAUNCH_TIMEOUT_S + (limits.IMPORT_WAIT_S if imports else 0.0)


def retry_launch(ctx: StepContext) -> None:
    """Send the launch again to nodes that have not answered."""
    ctx.disarm("launch")
    ctx.arm("launch-again", limits.LAUNCH_TIMEOUT_S)
    for name in list(ctx.state.group.launching):
        text = f"{name} has not answered its launch within {_launch_timeout_s(ctx.state):g} s"
        action = ctx.state.group.launches[name]
        ctx.state.group.launch(ctx.reemit(action, Reason("infrastructure", text)), action)


def collectives_begun(ctx: StepContext, event: CollectivesBegun) -> None:
    """A script that reports nothing trains: as far as can be seen, its incident is over."""
    state = ctx.state
    if event.generation != state.generation or not state.group.active:
        return
    state.counted_by = state.counted_by or "collectives"
    own_checkpoints.training_began(ctx)
    state.sizes.began = state.sizes.visible = True
    if (incident := state.led_to(event.generation)) is not None:
        began_ns = ctx.now_ns - seconds(event.ago_s)
        incident.first_step_ns = max(incident.first_step_ns or 0, began_ns)
    if state.stop is None and state.phase in ("starting", "recovering"):
        show_running(ctx)


def _note_resumption(state: JobState, event: StepCompleted) -> None:
    """Note after which step a script with its own checkpoints resumed, maybe after the incident."""
    incident = state.led_to(event.generation)
    if incident is not None and event.began_after is not None:
        incident.resumed_after_step = event.began_after
        incident.resumed_estimated = event.began_estimated


def step_completed(ctx: StepContext, event: StepCompleted) -> None:
    """All ranks have finished a step: the first one ends the start-up."""
    state = ctx.state
    if event.step_s > 0:
        state.step_s = event.step_s
    incident = state.incident
    if incident is not None and incident.generation_before == event.generation:
        # The heartbeats before the interruption knew of later steps than the journal.
        incident.step_before = max(incident.step_before, event.step)
    if event.generation != state.generation or not state.group.active:
        return
    reached(state, event.step)
    keeping.reported(state, keeps=event.keeps)
    state.counted_by = event.counted_by
    _note_resumption(state, event)
    if state.group.first_step_ns:
        staging_interval.consider(ctx, event)
        return
    state.group.first_step_ns = ctx.now_ns
    own_checkpoints.training_began(ctx)
    assert state.group.membership is not None
    state.sizes.visible = True
    state.sizes.has_worked(state.group.membership.world_size)
    # A generation that is being stopped already was interrupted by a later incident.
    if (incident := state.led_to(event.generation)) is not None:
        first_ns = ctx.now_ns - seconds(event.first_ago_s)
        incident.first_step_ns = max(first_ns, incident.started_ns or incident.at_ns)
    if state.stop is not None:
        return
    every_s = state.job.spec.checkpoint.storage.every_s
    if every_s is not None:
        ctx.arm("cadence", every_s)
    if state.phase in ("starting", "recovering"):
        show_running(ctx)


def show_running(ctx: StepContext) -> None:
    """Move to phase running, or stay there, with a reason that holds while workers run."""
    state = ctx.state
    assert state.group.membership is not None
    size = state.group.membership.world_size
    if state.group.first_step_ns:
        text = f"all {size} ranks train" if size != 1 else "its rank trains"
    elif state.sizes.began:
        text = "all ranks begin collectives"
    else:
        text = f"all workers run, on {_nodes(len(state.group.members))}"
    ctx.move("running", state.reason.code, text)
