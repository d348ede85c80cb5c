"""The state machine of one job: `step(now_ns, event) -> actions` and `next_deadline_ns()`.

Each step applies one event to the state, then runs every reconciler. Reconcilers are
level-triggered: they look at the state, not at the event, so after a crash they find the same work
again. The controller reads no clock, does no IO and is not random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..api.v1alpha1 import TrainingJob, job_from_mapping
from ..protocol import messages as m
from ..protocol.facts import state_after
from . import actions as a
from . import (
    checkpoints,
    completion,
    drain,
    host_memory,
    invariants,
    joining,
    launching,
    nodes,
    own_checkpoints,
    provisioning,
    quiesce,
    recovery,
    requests,
)
from . import events as e
from .actions import Reason
from .context import StepContext, seconds, stop_timeout_s
from .state import Cause, JobState, TimerName

FINISH_RETRY_S = 5.0


class Controller:
    """One job. `state` is None until JobSubmitted, then always the same object; only read it."""

    def __init__(self, state: JobState | None = None, job: TrainingJob | None = None) -> None:
        """`state`: continue from there, as a snapshot has it. `job`: what JobSubmitted will submit,
        so that its document is not parsed again."""
        self._state, self._job = state, job

    @property
    def state(self) -> JobState:
        """Read-only. AssertionError before JobSubmitted."""
        assert self._state is not None, "the first event of a job is e.JobSubmitted"
        return self._state

    @property
    def submitted(self) -> bool:
        return self._state is not None

    def next_deadline_ns(self) -> int | None:
        """Time of the next Tick; None: only events can change anything."""
        if self._state is None:
            return None
        # Timers that are due already were seen by the step that brought the time up to here.
        now_ns = self._state.now_ns
        return min((at for at in self._state.timers.values() if at > now_ns), default=None)

    def step(self, now_ns: int, event: e.AnyEvent) -> tuple[a.AnyAction, ...]:
        """Apply one event. Same state, time and event: same actions. Raises AssertionError (broken
        invariant, illegal transition) only for bugs of Holdfast."""
        if isinstance(event, e.FromNode) and isinstance(event.fact, m.Heartbeat):
            return ()
        if isinstance(event, e.JobSubmitted):
            assert self._state is None, "a job is submitted once"
            return self._submit(now_ns, event)
        state = self.state
        if isinstance(event, e.ControllerStarted):
            state.last_controller_ns = state.now_ns
        generation, state.now_ns = state.generation, max(now_ns, state.now_ns)
        ctx = StepContext(state, state.now_ns)
        if state.terminal:
            _after_the_end(ctx, event)
        else:
            if (handle := _HANDLERS.get(type(event))) is not None:
                handle(ctx, event)
            _fire_timers(ctx)
            _reconcile(ctx)
        if state.generation != generation:
            invariants.check(state)
        else:
            invariants.check_touched(state, getattr(event, "node", ""))
        return tuple(ctx.actions)

    def _submit(self, now_ns: int, event: e.JobSubmitted) -> tuple[a.AnyAction, ...]:
        job = self._job or job_from_mapping(event.spec, "the journal")
        self._state = JobState(
            job,
            event.job_id,
            now_ns,
            now_ns,
            checkpoint_path=event.checkpoint_path,
            needs_placement=True,
            intent="suspend" if job.spec.suspend else "run",
        )
        ctx = StepContext(self._state, now_ns)
        _reconcile(ctx)
        return tuple(ctx.actions)


def _after_the_end(ctx: StepContext, event: e.AnyEvent) -> None:
    """Handle an event after the end: only FinishJob is still of interest."""
    state = ctx.state
    match event:
        case e.ControllerStarted():
            state.incarnation = event.incarnation
            if state.finish_action is not None:
                completion.retry_finish(ctx, "its result was lost")
        case e.ActionSucceeded() if event.action_id == state.finish_action:
            completion.finished(ctx, event.detail)
        case e.ActionFailed() if event.action_id == state.finish_action:
            ctx.note(f"finishing the job failed: {event.detail}; trying again")
            ctx.arm("finish", FINISH_RETRY_S)
        case e.Tick() if ctx.due("finish"):
            completion.retry_finish(ctx, "trying again")
        case _:
            pass


# -- reconcilers ------------------------------------------------------------------------------
def _conclude(ctx: StepContext) -> None:
    """A generation has stopped on all its nodes: the job continues, ends, or is suspended."""
    state, stop = ctx.state, ctx.state.stop
    if stop is None or stop.waiting:
        return
    must_fail = recovery.conclude(ctx)
    if stop.purpose == "finish" and state.intent == "run":
        completion.workers_done(ctx, stop)
    elif state.intent == "run" and must_fail is not None:
        # Only now: a job that is suspended or cancelled does not end by this error.
        completion.end_early(ctx, "failed", must_fail, state.incidents[-1].traceback)
    else:
        ctx.place()
        if state.intent == "run" and state.phase == "suspending":
            ctx.move("recovering", "resume", "resumed before it was suspended")


_RECONCILERS: tuple[Callable[[StepContext], None], ...] = (
    # First: what follows depends on whether a generation runs, stops, or has ended.
    _conclude,
    # Before placement: a job that is suspended or ends launches no generation.
    requests.follow_intent,
    # After the intent: a suspend or cancel comes before a resize or a replacement.
    requests.interrupt_if_planned,
    # After all that may want a planned interruption: if none does, no step has to be staged.
    quiesce.drop_if_withdrawn,
    # Before placement: a drain that ends may suspend or end the job, or want a new generation.
    completion.check_drain,
    # Recall before request: a job that shrank must not request what it is about to release.
    provisioning.recall_promised,
    # Before placement, which waits only for nodes that are expected.
    provisioning.request_missing,
    launching.place,
    # After placement: memory is at risk only if no generation could start from it.
    drain.persist_at_risk,
    # Last: only now is it known which nodes are members, and which hold the restore point.
    provisioning.release_surplus,
)


def _reconcile(ctx: StepContext) -> None:
    for reconciler in _RECONCILERS:
        if not ctx.state.terminal:
            reconciler(ctx)


# -- events -----------------------------------------------------------------------------------
def _from_node(ctx: StepContext, event: e.FromNode) -> None:
    _FACTS[type(event.fact)](ctx, event.node, event.fact)


def _joined(ctx: StepContext, node: str, fact: m.NodeJoined) -> None:
    cause = nodes.joined(ctx, node, fact)
    if cause is not None:
        recovery.interrupt(ctx, cause)
    launching.check_launched(ctx)


def _lost(ctx: StepContext, event: e.NodeLost) -> None:
    cause = nodes.lost(ctx, event)
    if cause:
        recovery.member_lost(ctx, event, cause)


def _exited(ctx: StepContext, node: str, fact: m.WorkerExited) -> None:
    if fact.generation == ctx.state.generation and ctx.state.is_member(node):
        recovery.worker_exited(ctx, node, fact.exit)
    else:
        ctx.note(f"{node}: ignored the end of a worker of generation {fact.generation}")


def _stopped(ctx: StepContext, node: str, fact: m.GroupStopped) -> None:
    state = ctx.state
    state.inflight.pop(fact.action_id, None)
    if fact.generation == state.generation and state.is_member(node):
        if state.stop is not None and node in state.stop.waiting:
            recovery.group_stopped(ctx, node, fact)
    else:
        nodes.stale_stopped(ctx, node, fact)


def _hang(ctx: StepContext, event: e.HangDetected) -> None:
    state = ctx.state
    if event.generation != state.generation or not state.runs:
        return
    reason = Reason("hang", f"no progress: {event.evidence}")
    hang = (event.ranks, event.evidence)
    cause = Cause("failure", reason, stacks=True, hang=hang, hang_basis=event.basis)
    recovery.interrupt(ctx, cause)
    if (stop := ctx.state.stop) is not None:
        stop.ended_ns = ctx.now_ns - seconds(event.quiet_s)


def _hang_suspected(ctx: StepContext, event: e.HangSuspected) -> None:
    if event.generation == ctx.state.generation and ctx.state.runs:
        recovery.inspect(ctx, event)


def _inspected(ctx: StepContext, node: str, fact: m.GroupInspected) -> None:
    if fact.generation == ctx.state.generation and ctx.state.runs:
        recovery.inspected(ctx, node, fact)


def _straggler(ctx: StepContext, event: e.StragglerDetected) -> None:
    ctx.note(f"{event.node} is slow: {event.evidence}")
    state = ctx.state
    current = event.generation == state.generation and state.runs
    if current and state.job.spec.recovery.replace_stragglers:
        nodes.replace_slow(ctx, event.node, event.evidence)


def _succeeded(ctx: StepContext, event: e.ActionSucceeded) -> None:
    action = ctx.state.inflight.pop(event.action_id, None)
    match action:
        case a.LaunchGroup() if action.membership.ahead:
            joining.answered(ctx, action)
        case a.LaunchGroup():
            launching.launched(ctx, action)
        case a.RequestNodes():
            provisioning.request_granted(ctx, action, event)
        case a.CommitManifest():
            checkpoints.commit_succeeded(ctx, action)
        case a.StageStep():
            quiesce.answered(ctx, action)
        case _:
            pass


def _failed(ctx: StepContext, event: e.ActionFailed) -> None:
    state = ctx.state
    action = state.inflight.pop(event.action_id, None)
    match action:
        case a.LaunchGroup() if action.membership.ahead:
            joining.answered(ctx, action, event.detail or "no detail given")
        case a.LaunchGroup() if state.group.launching.get(action.node) == action.action_id:
            _launch_failed(ctx, action.node, event.detail or "no detail given")
        case a.RequestNodes():
            provisioning.request_failed(ctx, action, event.detail)
        case a.ReleaseNode():
            provisioning.release_failed(ctx, action, event.detail)
        case a.CommitManifest():
            checkpoints.commit_failed(ctx, action, event.detail, final=event.final)
        case a.CleanStorage():  # the next commit, controller or the end of the job cleans again
            ctx.note(f"storage was not cleaned: {event.detail}")
        case a.StageStep():
            quiesce.answered(ctx, action, event.detail)
        case a.PersistStep() if state.drain is not None:
            ctx.note(
                f"{action.node} could not be asked for {state_after(action.step)}: {event.detail}"
            )
            ctx.arm("drain", drain.RETRY_S)
        case _:
            pass


def _unknown(ctx: StepContext, event: e.ActionUnknown) -> None:
    """The connection broke before the result came. Launches and stops are sent again when their
    node reconnects (nodes.joined); the rest is idempotent and is repeated."""
    action = ctx.state.inflight.get(event.action_id)
    ahead = isinstance(action, a.LaunchGroup) and action.membership.ahead
    if ahead or isinstance(
        action, a.ReleaseNode | a.CommitManifest | a.CleanStorage | a.StageStep | a.PersistStep
    ):
        _failed(ctx, e.ActionFailed(action_id=event.action_id, detail="result unknown"))
    else:
        ctx.state.inflight.pop(event.action_id, None)
        if isinstance(action, a.RequestNodes):
            provisioning.request_unknown(ctx)


def _launch_failed(ctx: StepContext, node: str, detail: str) -> None:
    reason = Reason("infrastructure", f"{node} could not start its workers: {detail}")
    recovery.interrupt(ctx, Cause("failure", reason, launch_failure=(node, detail)))


def _refused(ctx: StepContext, event: e.CheckpointRefused) -> None:
    if checkpoints.refused(ctx, event):
        reason = Reason("checkpoint", event.detail)
        recovery.interrupt(ctx, Cause("failure", reason, refused=event.detail))


def _started(ctx: StepContext, event: e.ControllerStarted) -> None:
    state = ctx.state
    first = state.incarnation == 0 and event.incarnation <= 1
    state.incarnation = event.incarnation
    quiesce.end(ctx)
    if state.num_launches == 0 and event.committed:
        # Directories of an earlier job at the same path: never write into one of them.
        ctx.fence(max(file.generation for file in event.committed))
    if not first:
        for lost in nodes.controller_started(ctx, event.nodes):
            _lost(ctx, lost)
        drain.controller_started(ctx)
    checkpoints.observed(ctx, event.committed, listed=event.listed)


# -- timers -----------------------------------------------------------------------------------
def _fire_timers(ctx: StepContext) -> None:
    """Act on timers that are due. Those that only end a wait (gather, replacement, capacity, grow,
    standbys, preempt, stage, persist) are read by the reconciler that waits."""
    for name, act in _TIMERS:
        if ctx.due(name):
            act(ctx)


def _rejoin_expired(ctx: StepContext) -> None:
    for lost in nodes.rejoin_expired(ctx):
        _lost(ctx, lost)


def _stop_expired(ctx: StepContext) -> None:
    stop = ctx.state.stop
    assert stop is not None, "its timer is disarmed with the stop"
    for name in list(stop.waiting):
        detail = f"did not stop its workers in {stop_timeout_s(ctx.state.job):g} s"
        _lost(ctx, e.NodeLost(node=name, cause="no-stop", detail=detail))


def _launch_expired(ctx: StepContext) -> None:
    for node in list(ctx.state.group.launching)[:1]:
        _launch_failed(ctx, node, "it did not answer")


_TIMERS: tuple[tuple[TimerName, Callable[[StepContext], None]], ...] = (
    ("rejoin", _rejoin_expired),
    ("stop", _stop_expired),
    ("launch", launching.retry_launch),
    ("launch-again", _launch_expired),
    ("deadline", requests.deadline_passed),
    ("cadence", drain.cadence_due),
    ("request", lambda ctx: ctx.disarm("request")),
    ("expect", provisioning.expectation_expired),
    ("release", provisioning.retry_releases),
    ("commit", checkpoints.retry_commits),
    ("drain", drain.request_persist),
)

_FACTS: dict[type, Callable[[StepContext, str, Any], None]] = {
    m.NodeRemarked: recovery.remarked,
    m.OwnCheckpointSeen: own_checkpoints.seen,
    m.OwnCheckpointRead: own_checkpoints.was_read,
    m.NodeJoined: _joined,
    m.StandbysReported: nodes.standbys_reported,
    m.PreemptionNoticed: nodes.preemption_noticed,
    m.WorkerExited: _exited,
    m.GroupInspected: _inspected,
    m.GroupStopped: _stopped,
    m.NodeMemoryPlanned: host_memory.planned,
    m.ShardPersisted: checkpoints.shard_persisted,
    m.PersistFailed: drain.persist_failed,
}
_HANDLERS: dict[type, Callable[[StepContext, Any], None]] = {
    e.ResizeRequested: requests.resize,
    e.AdjustRequested: requests.adjust,
    e.AgainRequested: requests.again,
    e.SuspendRequested: requests.suspend,
    e.ResumeRequested: requests.resume,
    e.CancelRequested: requests.cancel,
    e.FaultInjected: recovery.fault_injected,
    e.FromNode: _from_node,
    e.NodeLost: _lost,
    e.StepCompleted: launching.step_completed,
    e.HangDetected: _hang,
    e.HangSuspected: _hang_suspected,
    e.HangSuspicionEnded: recovery.suspicion_ended,
    e.CollectivesBegun: launching.collectives_begun,
    e.StragglerDetected: _straggler,
    e.HeartbeatsLost: recovery.heartbeats_lost,
    e.HeartbeatsRestored: recovery.heartbeats_restored,
    e.ActionSucceeded: _succeeded,
    e.ActionFailed: _failed,
    e.ActionUnknown: _unknown,
    e.CheckpointRefused: _refused,
    e.CheckpointsListed: checkpoints.listed,
    e.ControllerStarted: _started,
}
