"""Recovery: stopping a generation, judging why it was interrupted, and deciding whether the job
goes on: restart budgets, strikes against nodes, errors that a restart does not change.

launching.py starts the next generation, completion.py ends the job.
"""

from __future__ import annotations

from .. import limits
from ..api.v1alpha1 import Budget
from ..protocol.facts import USAGE_CODE, Exit, Stack
from ..protocol.messages import GroupInspected, GroupStopped, NodeRemarked
from . import keeping, launching, nodes, own_checkpoints, provisioning, quiesce, sizes
from .actions import InspectGroup, Reason, ReasonCode, StopGroup
from .checkpoints import DISTRUST_AFTER, refuse
from .context import (
    MAX_INCIDENTS,
    SECOND_NS,
    StepContext,
    recovery_of,
    seconds,
    stop_timeout_s,
)
from .events import (
    FaultInjected,
    HangSuspected,
    HangSuspicionEnded,
    HeartbeatsLost,
    HeartbeatsRestored,
    NodeLost,
)
from .failure import (
    HOPELESS_TYPES,
    REPEATS,
    SHARDED_OVER_WORLD,
    Failure,
    FailureEvidence,
    attribute,
    is_failure,
    place,
    when,
)
from .hang.facts import InspectedStack
from .hang.suspects import describe
from .rank_assignment import resized, sharded_over_world
from .state import (
    LAUNCH,
    PLANNED,
    Cause,
    IncidentRecord,
    JobState,
    PendingStop,
    Purpose,
)
from .transitions import JobPhase

INJECTION_WINDOW_S = 60.0
"""A failure this soon after a fault injection on its node was caused by it."""
MAX_PLACES = 100
MAX_SIZE_ERROR = 300
"""Characters kept of why a size is not tried again."""
STORE_RETRY_S, MAX_STORE_RETRY_S = 1.0, 30.0
"""The first and the longest pause before a store that could not be read is tried again."""
STORE_UNREADABLE = "store-unreadable"
"""The rule of an incident in which a generation could not read the store."""
# Failures that do not throw doubt on the state that the generation started from.
NOT_THE_STATE = (
    "launch-failed", "journal-behind", "preempted", "lost-first", "node-lost", "outside-signal",
    "hang", "device-missing",
)  # fmt: skip
# Failures that do not throw doubt on the machine that showed them.
NOT_THE_NODE = (
    "checkpoint-refused", "checkpoint-damaged", "checkpoint-missing", "checkpoint-unreadable",
    "out-of-memory", "network", "unknown",
)  # fmt: skip
# Failures after which the machine cannot be used.
NO_SECOND_CHANCE = ("device-missing",)
PHASE_OF: dict[Purpose, JobPhase] = {
    "failure": "recovering", "resize": "recovering", "new-code": "recovering",
    "preemption": "recovering",
    "suspend": "suspending", "cancel": "finishing", "deadline": "finishing",
    "finish": "finishing",
}  # fmt: skip


# -- interrupting -----------------------------------------------------------------------------
def interrupt(ctx: StepContext, cause: Cause) -> None:
    """Stop the current generation on all its nodes. While it is being stopped already, `cause` is
    added to the interruption under way.

    A planned interruption may have to wait until a step is staged; reconcilers call this again in
    every step in which they still want it.
    """
    state = ctx.state
    if not state.group.active:
        return
    if state.stop is not None:
        state.stop.add(cause)
        return
    quiesce.prepare(ctx, cause)
    if quiesce.awaited(ctx, cause.purpose):
        return
    quiesce.end(ctx)
    reason, grace_s = cause.reason, _grace_s(ctx, cause.purpose)
    stop = state.stop = PendingStop(
        cause.purpose,
        reason,
        ctx.now_ns,
        cause.stacks,
        grace_s,
        lost_first=cause.lost is not None,
        hang=cause.hang,
        hang_basis=cause.hang_basis,
        leaving=list(cause.leaving),
    )
    stop.add(cause)
    if cause.purpose != "finish":
        _open_incident(ctx, cause)
    ctx.move(PHASE_OF[cause.purpose], reason.code, reason.text)
    state.group.launching.clear()
    ctx.disarm(*PLANNED, *LAUNCH, "cadence")
    save_grace_s = _save_grace_s(ctx, cause)
    after_step, keep = quiesce.last_step(state, grace_s), keeping.may_keep(state, cause)
    for name in state.group.members:
        if name in state.nodes:
            stop.waiting[name] = ctx.emit(
                StopGroup,
                reason,
                node=name,
                grace_s=grace_s,
                stacks=cause.stacks,
                save_grace_s=save_grace_s,
                after_step=after_step,
                keep=keep,
            )
    stacks_s = limits.STACK_TIMEOUT_S if cause.stacks else 0.0
    ctx.arm("stop", stop_timeout_s(ctx.state.job) + grace_s + stacks_s + save_grace_s)


def _grace_s(ctx: StepContext, purpose: Purpose) -> float:
    """Seconds that workers may take to end by themselves: in a planned stop a script may save."""
    spec = ctx.state.job.spec
    if purpose in ("failure", "finish") or spec.entrypoint.recipe is not None:
        return 0.0
    if ctx.state.hold is not None:  # it would save over what the job is held for
        return 0.0
    grace_s = spec.recovery.termination_grace_s
    if purpose == "preemption":
        # Half of what the leaving nodes have left: the hand-over comes after it.
        leaving = ctx.state.nodes.in_order(ctx.state.nodes.leaving)
        leave_times = [node.leaves_ns for node in leaving if node.leaves_ns is not None]
        if leave_times:
            return max(0.0, min(grace_s, (min(leave_times) - ctx.now_ns) / SECOND_NS / 2))
    return grace_s


def _save_grace_s(ctx: StepContext, cause: Cause) -> float:
    """Seconds for survivors to end a declared save; 0 in a hang: its ranks wait for each other."""
    is_script = ctx.state.job.spec.entrypoint.recipe is None
    failed = cause.purpose == "failure" and cause.hang is None
    return limits.SAVE_GRACE_S if is_script and failed else 0.0


def _open_incident(ctx: StepContext, cause: Cause) -> None:
    state = ctx.state
    assert state.group.membership is not None
    state.num_incidents += 1
    state.incidents.append(
        IncidentRecord(
            number=state.num_incidents,
            at_ns=ctx.now_ns,
            noticed_ns=ctx.now_ns,
            purpose=cause.purpose,
            generation_before=state.generation,
            world_size_before=state.group.membership.world_size,
            title=cause.reason.text,
            step_before=state.step,
        )
    )
    del state.incidents[:-MAX_INCIDENTS]
    if len(state.incidents) > limits.MAX_INCIDENTS_IN_FULL:
        old = state.incidents[-1 - limits.MAX_INCIDENTS_IN_FULL]
        old.traceback, old.stacks = "", {}


def worker_exited(ctx: StepContext, node: str, exit: Exit) -> None:
    """Record how a worker of the current generation ended; a failure stops the others."""
    state = ctx.state
    if exit.rank in state.group.exits or not state.group.active:
        return
    state.group.exits[exit.rank] = (node, exit)
    keeping.exited(state, exit)
    if is_failure(exit) and state.stop is None:
        how = f"signal {exit.signal}" if exit.signal is not None else f"exit code {exit.code}"
        text = f"worker {exit.rank} on {node} ended with {how}"
        interrupt(ctx, Cause("failure", Reason("infrastructure", text)))
    _date_failure(ctx, exit)


def _date_failure(ctx: StepContext, exit: Exit) -> None:
    stop = ctx.state.stop
    if stop is not None and is_failure(exit):
        at_ns = ctx.now_ns - seconds(exit.ago_s)
        stop.ended_ns = at_ns if stop.ended_ns is None else min(stop.ended_ns, at_ns)


def member_lost(ctx: StepContext, event: NodeLost, cause: str) -> None:
    """A node of the current generation is gone."""
    node, detail = event.node, event.detail or event.cause
    reason = Reason("infrastructure", f"{node} was lost ({cause}): {detail}")
    interrupt(ctx, Cause("failure", reason, lost=(node, cause, detail)))
    if (stop := ctx.state.stop) is not None and stop.last_seen_ns is None:
        stop.last_seen_ns = ctx.now_ns - seconds(event.ago_s)
    ctx.arm_once("replacement", ctx.state.job.spec.recovery.replacement_wait_s)


def heartbeats_lost(ctx: StepContext, event: HeartbeatsLost) -> None:
    """Show the silence as the job's reason only: the cause is probably on the controller's side."""
    whom = f"any of {event.nodes} nodes" if event.nodes != 1 else "the only node"
    then = "they are" if event.nodes != 1 else "it is"
    _show(
        ctx,
        f"no heartbeat from {whom} for {event.seconds:.1f} s: this machine may be overloaded or "
        f"disconnected; {then} declared lost after {event.patience_s:g} s",
    )


def heartbeats_restored(ctx: StepContext, event: HeartbeatsRestored) -> None:
    _show_over(ctx, f"heartbeats arrive again, after {event.seconds:.1f} s without any")


def inspect(ctx: StepContext, event: HangSuspected) -> None:
    """Ask all nodes what their workers do."""
    _show(ctx, f"no progress: {event.evidence}")
    reason = Reason("hang", event.evidence)
    for name in ctx.state.group.members:
        ctx.emit(InspectGroup, reason, node=name)


def inspected(ctx: StepContext, node: str, fact: GroupInspected) -> None:
    """Show what a worker does that its peers may wait for."""
    ctx.state.inspected |= {stack.rank: stack for stack in fact.stacks}
    for stack in fact.stacks:
        if stack.activity in ("nothing", "reads", "compiles"):
            text = describe(stack.rank, None, InspectedStack(stack, 0))
            _show(ctx, f"no progress: {text}, on {node}")
            return


def suspicion_ended(ctx: StepContext, event: HangSuspicionEnded) -> None:
    """A hang that ends by itself is not charged."""
    ctx.state.inspected.clear()
    _show_over(ctx, f"progress after {event.seconds:.1f} s without any")


def fault_injected(ctx: StepContext, event: FaultInjected) -> None:
    ctx.state.ledger.injected_faults[event.node] = ctx.now_ns


def remarked(ctx: StepContext, node: str, fact: NodeRemarked) -> None:
    show = _show if fact.shown else StepContext.note
    show(ctx, f"{node}: {fact.text}")


def _show_over(ctx: StepContext, text: str) -> None:
    """Note the end of what was shown, and show a running job as such again."""
    ctx.note(text)
    if ctx.state.phase == "running":
        launching.show_running(ctx)


def _show(ctx: StepContext, text: str) -> None:
    ctx.note(text)
    if ctx.state.phase == "running":
        ctx.move("running", ctx.state.reason.code, text)


def group_stopped(ctx: StepContext, node: str, fact: GroupStopped) -> None:
    """A member of the current generation has stopped its workers."""
    state, stop = ctx.state, ctx.state.stop
    assert stop is not None
    stop.waiting.pop(node, None)
    nodes.group_stopped(state, node, fact)
    keeping.kept(state, node, fact)
    for exit in fact.exits:
        state.group.exits.setdefault(exit.rank, (node, exit))  # the first report counts
        keeping.exited(state, exit)
        _date_failure(ctx, exit)
    stop.stacks.extend(fact.stacks)


# -- concluding -------------------------------------------------------------------------------
def conclude(ctx: StepContext) -> Reason | None:
    """All nodes have stopped, or are lost. Returns why the job must fail; None: it continues."""
    state, stop = ctx.state, ctx.state.stop
    assert stop is not None and not stop.waiting
    state.stop, state.group.active = None, False
    if state.group.first_step_ns:
        state.ledger.num_store_failures = 0
    ctx.disarm("stop")
    incident = state.incident
    if incident is None or stop.purpose == "finish":
        return None
    incident.stopped_ns = ctx.now_ns
    incident.at_ns = _fault_ns(state, stop, incident)
    steps = [exit.step for _node, exit in state.group.exits.values()]
    if len(steps) == incident.world_size_before:
        incident.step_before = max(incident.step_before, min(steps))
    else:
        incident.at_least = bool(stop.lost)
        # All ranks take part in each step: one that has ended a step shows that all ended the last.
        incident.step_before = max([incident.step_before, *(step - 1 for step in steps)])
    # A rank stages a step before it reports that it has finished it.
    held = state.nodes.complete()
    staged = [step for (step, written_by), _ in held if written_by == state.generation]
    incident.step_before = max([incident.step_before, *staged[:1]])
    # A program posts its progress now and then.
    incident.at_least |= state.counted_by == "posted"
    launching.reached(state, incident.step_before)
    _add_inspected(state, stop)
    incident.stacks = _kept_stacks(stop.stacks, stop.hang[0] if stop.hang is not None else ())
    if stop.purpose == "preemption":
        names = ", ".join(node for node, _why in stop.leaving)
        incident.failure_class, incident.rule = "preemption", "preempted"
        slow = all(n in state.nodes and state.nodes[n].slow for n, _why in stop.leaving)
        incident.title = f"{names} is slow and replaced" if slow else f"{names} will be preempted"
        incident.evidence = "; ".join(dict.fromkeys(why for _node, why in stop.leaving))
        incident.culprit_node = stop.leaving[0][0]
        _learn_size(ctx, incident)
        return _charge(ctx, incident)
    if stop.purpose == "failure":
        return _judge(ctx, stop, incident)
    _learn_size(ctx, incident)
    return None


def _fault_ns(state: JobState, stop: PendingStop, incident: IncidentRecord) -> int:
    """Time at which the first worker failed by itself or, if none did, a lost node was last seen.
    The controller may have been away since. A fault that was noticed within a heartbeat counts from
    then, and none counts from before the generation trained."""
    known_ns = stop.ended_ns if stop.ended_ns is not None else stop.last_seen_ns
    if known_ns is None or stop.purpose != "failure":
        return incident.at_ns
    trained_ns = state.group.first_step_ns or state.group.launched_ns
    fault_ns, at_once_s = max(known_ns, trained_ns), recovery_of(state.job).heartbeat_interval_s
    return fault_ns if incident.at_ns - fault_ns > seconds(at_once_s) else incident.at_ns


def _add_inspected(state: JobState, stop: PendingStop) -> None:
    """A worker that ended with its peers, before its stack was taken, has the inspected one."""
    taken = {stack.rank for stack in stop.stacks}
    if stop.hang is not None:
        stop.stacks += [stack for rank, stack in state.inspected.items() if rank not in taken]
    state.inspected = {}


def _kept_stacks(stacks: list[Stack], suspects: tuple[int, ...]) -> dict[int, str]:
    """Rank -> stack. Every snapshot holds them: if they are too long, stacks of ranks that do not
    wait for their peers are kept first, then those of the likeliest suspects."""
    likely = {rank: index for index, rank in enumerate(suspects)}
    room, kept = limits.MAX_INCIDENT_STACK_BYTES, dict[int, None]()
    ranked = sorted(stacks, key=lambda s: (s.in_collective, likely.get(s.rank, len(likely))))
    for stack in ranked:
        room -= len(stack.text.encode())
        if room >= 0 or not kept:
            kept[stack.rank] = None
    return {stack.rank: stack.text for stack in stacks if stack.rank in kept}


def forget_places(state: JobState) -> None:
    """New code may fail elsewhere, or not at all."""
    state.ledger.failed_at.clear()


def _judge(ctx: StepContext, stop: PendingStop, incident: IncidentRecord) -> Reason | None:
    state = ctx.state
    failure = attribute(
        FailureEvidence(
            exits=tuple(state.group.exits.values()),
            lost=tuple((node, *why) for node, why in stop.lost.items()),
            lost_first=stop.lost_first,
            hang=stop.hang,
            hang_basis=stop.hang_basis,
            stacks=tuple(stop.stacks),
            launch_failure=stop.launch_failure,
            refused=stop.refused,
            journal_behind=stop.journal_behind,
            leaving=tuple(
                (node.name, node.leave_reason) for node in state.nodes.in_order(state.nodes.leaving)
            ),
            node_of=state.node_of,
            world_size=incident.world_size_before,
        )
    )
    if _follows_model(ctx, failure, incident):
        return None
    incident.failure_class, incident.rule = failure.failure_class, failure.rule
    incident.title, incident.evidence = failure.title, failure.evidence
    incident.culprit_node, incident.culprit_rank = failure.culprit_node, failure.culprit_rank
    if failure.exit is not None:
        incident.traceback = failure.exit.traceback
    if failure.failure_class != "user" and failure.rule not in sizes.RULES:
        _learn_size(ctx, incident)
    if rule := keeping.failed(ctx, failure):
        incident.failure_class, incident.rule = "infrastructure", rule
        if rule == keeping.NOT_KEPT:
            incident.title = f"not charged, since processes had been kept: {failure.title}"
        ctx.move(state.phase, "infrastructure", failure.title)
        return None
    code: ReasonCode = failure.failure_class if failure.failure_class != "user" else "user-error"
    ctx.move(state.phase, code, failure.title)
    tries_older = _doubt_the_state(ctx, failure)
    if _waits_for_store(ctx, failure):
        incident.rule = STORE_UNREADABLE
        return None
    injected = state.ledger.injected_faults.pop(failure.culprit_node, None)
    if injected is not None and ctx.now_ns - injected <= seconds(INJECTION_WINDOW_S):
        incident.fault_injected = True
        return None
    if _not_this_size(ctx, failure, incident):
        return None
    mistake = _same_mistake(ctx, failure)
    if mistake is not None and not tries_older:
        incident.failure_class = "user"
        return mistake
    _strike(ctx, failure)
    return _charge(ctx, incident)


def _follows_model(ctx: StepContext, failure: Failure, incident: IncidentRecord) -> bool:
    """The spec leaves the mesh to Holdfast, and the script has sharded its model over all ranks: so
    does the mesh from now on. This is not a failure."""
    exit = failure.exit
    job = sharded_over_world(ctx.state.job)
    if exit is None or exit.error_type != SHARDED_OVER_WORLD or job is None:
        return False
    ctx.replace_job(job)
    incident.purpose, incident.rule = "resize", "model-sharding"
    incident.title = "the model is sharded over all ranks; the mesh follows it (shard: world)"
    ctx.move(ctx.state.phase, "resize", incident.title)
    return True


def _doubt_the_state(ctx: StepContext, failure: Failure) -> bool:
    """A state from which generations fail before their first step may be damaged itself. Whether
    the script is to read an older checkpoint of its own next."""
    state = ctx.state
    assert state.group.membership is not None
    restore = state.group.membership.restore
    if state.group.first_step_ns or failure.rule in NOT_THE_STATE:
        return False
    if restore is None:
        own = failure.rule in ("user-exception", "exit-code") and not state.sizes.began
        return own and own_checkpoints.start_failed(ctx)
    key = (restore.step, restore.generation)
    if not restore.directory:
        weight = DISTRUST_AFTER if failure.damaged else 1
        state.catalog.distrusted[key] = state.catalog.distrusted.get(key, 0) + weight
    elif failure.damaged:
        problem = failure.exit.error_message if failure.exit is not None else failure.evidence
        missing = failure.rule == "checkpoint-missing"
        refuse(ctx, key, "missing" if missing else "damaged", problem)
    return False


def _waits_for_store(ctx: StepContext, failure: Failure) -> bool:
    """True if the generation could not read the store, which is tried again, without a charge."""
    state = ctx.state
    assert state.group.membership is not None
    restore = state.group.membership.restore
    if failure.rule != "checkpoint-unreadable" or restore is None or not restore.directory:
        return False
    assert failure.exit is not None
    pause_s = min(STORE_RETRY_S * 2**state.ledger.num_store_failures, MAX_STORE_RETRY_S)
    state.ledger.num_store_failures = min(state.ledger.num_store_failures + 1, 10)
    ctx.arm("storage", pause_s)
    problem = failure.exit.error_message
    text = f"the store cannot be read ({problem}); it is tried again in {pause_s:g} s"
    ctx.move(state.phase, "checkpoint", text)
    return True


def _strike(ctx: StepContext, failure: Failure) -> None:
    """Cordon a machine that causes incidents again and again."""
    state, node = ctx.state, failure.culprit_node
    of_machines = failure.failure_class in ("infrastructure", "hang")
    if not node or not of_machines or failure.rule in NOT_THE_NODE:
        return
    window = seconds(state.job.spec.recovery.budgets.infrastructure.window_s)
    recent = [at for at in state.ledger.strikes.get(node, []) if ctx.now_ns - at < window]
    recent.append(ctx.now_ns)
    state.ledger.strikes[node] = recent
    hopeless = failure.rule in NO_SECOND_CHANCE
    enough = hopeless or len(recent) >= state.job.spec.recovery.bad_node_strikes
    if enough and node in state.nodes:
        count = f"{len(recent)} incident{'s' if len(recent) != 1 else ''}"
        why = f"cannot be used: {failure.title}" if hopeless else f"caused {count}"
        state.ledger.cordoned[node] = f"{node} {why}"
        ctx.note(state.ledger.cordoned[node])
        ctx.arm_once("replacement", state.job.spec.recovery.replacement_wait_s)


def _learn_size(ctx: StepContext, incident: IncidentRecord) -> None:
    """A script that reports no steps has trained at this size, as far as can be seen."""
    state = ctx.state
    early_s = state.sizes.early_s(state.job.spec.recovery.startup_timeout_s)
    if state.sizes.began or ctx.now_ns - state.group.launched_ns >= seconds(early_s):
        state.sizes.has_worked(incident.world_size_before)


def _not_this_size(ctx: StepContext, failure: Failure, incident: IncidentRecord) -> bool:
    """True if the script failed early, at a size at which it never worked, while it worked at
    another. Such failures are not charged: there are few, see sizes.py."""
    state, exit, world = ctx.state, failure.exit, incident.world_size_before
    early_s = state.sizes.early_s(state.job.spec.recovery.startup_timeout_s)
    group = state.group
    early = not group.first_step_ns and ctx.now_ns - group.launched_ns < seconds(early_s)
    is_script = state.job.spec.entrypoint.recipe is None
    if not (is_script and early and failure.rule in sizes.RULES and state.sizes.is_new(world)):
        return False
    if exit is None or exit.error_type in HOPELESS_TYPES:
        return False
    state.sizes.failed[world] = state.sizes.failed.get(world, 0) + 1
    good = " or ".join(str(size) for size in sorted(state.sizes.worked))
    failed = f"the script failed with a world of {world}, and worked with {good}"
    error = f"{exit.error_type}: {exit.error_message}" if exit.error_type else failure.title
    before = state.sizes.refused
    state.sizes.refused = before | {world: error[:MAX_SIZE_ERROR]}
    if not nodes.possible_size(state) and state.sizes.failed[world] < sizes.TRIES:
        state.sizes.refused = before
        text = f"{failed}; it is tried once more, because no other size is possible now"
    else:
        text = f"{failed}; {world} is not tried again in this job"
        if not provisioning.full_size(state):  # a user had requested a size that does not work
            back = max(state.sizes.worked) // state.job.spec.workers_per_node
            ctx.replace_job(resized(state.job, back))
            text += f"; the job is to have {back} nodes again"
    incident.evidence += f"; {text}"
    ctx.note(text)
    ctx.move(state.phase, "user-error", f"{failure.title}; {text}")
    return True


def _same_mistake(ctx: StepContext, failure: Failure) -> Reason | None:
    """Reason why a restart does not help: failures at one place again and again are the training
    program's, not bad luck and not the machine's."""
    state, exit = ctx.state, failure.exit
    if exit is not None and exit.error_type in HOPELESS_TYPES:
        return Reason("user-error", f"{exit.error_type} {when(exit)}: {exit.error_message}")
    usage = exit is not None and exit.code == USAGE_CODE and exit.error_message
    began = state.group.first_step_ns or state.sizes.began
    if failure.rule == "exit-code" and usage and not began:
        return Reason("user-error", f"{failure.title}: {usage}")
    key = place(failure, state.step)
    if key is None:
        return None
    window = seconds(getattr(state.job.spec.recovery.budgets, failure.failure_class).window_s)
    raised = failure.rule in ("user-exception", "out-of-memory")
    before = state.ledger.failed_at.pop(key, [])
    recent = [(node, at) for node, at in before if raised or ctx.now_ns - at < window]
    recent.append((failure.culprit_node, ctx.now_ns))
    state.ledger.failed_at[key] = recent
    while len(state.ledger.failed_at) > MAX_PLACES:
        del state.ledger.failed_at[next(iter(state.ledger.failed_at))]
    machines = dict.fromkeys(node for node, _at in recent)
    if len(machines if failure.rule == "native-crash" else recent) < REPEATS[failure.rule]:
        return None
    if raised:
        assert exit is not None
        text = f"the same {exit.error_type} {when(exit)}, twice: {exit.error_message}"
    elif failure.rule == "native-crash":
        text = f"the script crashed at one place on {' and '.join(machines)}: {failure.evidence}"
    else:
        text = f"{failure.title}, {len(recent)} times at one place: {failure.evidence}"
    return Reason("user-error", text)


def _charge(ctx: StepContext, incident: IncidentRecord) -> Reason | None:
    """Charge a restart to the budget of the incident's class; returns why there can be none."""
    state, failure_class = ctx.state, incident.failure_class
    assert failure_class is not None
    budget: Budget = getattr(state.job.spec.recovery.budgets, failure_class)
    window = seconds(budget.window_s)
    recent = [at for at in state.ledger.charges.get(failure_class, []) if ctx.now_ns - at < window]
    state.ledger.charges[failure_class] = recent
    if len(recent) >= budget.restarts:
        return Reason(
            "budget",
            f"{incident.title}; the {failure_class} budget is used up: {len(recent)} restarts in "
            f"the last {budget.window_s:g} s, {budget.restarts} allowed",
        )
    recent.append(ctx.now_ns)
    state.ledger.restarts[failure_class] = state.ledger.restarts.get(failure_class, 0) + 1
    return None
