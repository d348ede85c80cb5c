"""The state machine of one job: `step(now_ns, event) -> actions` and `next_deadline_ns()`.

Owns: the only place where state changes: it hands a Turn to the modules beside it and takes it
back. Each step first notes the fact (`_note`), then does whatever the new state asks for
(`_settle`), which looks at levels and not at edges: after a crash the same look finds the same
work. Must not: read a clock, do IO, or be random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import limits
from ..api.v1alpha1 import job_from_mapping
from . import checkpoints, completion, invariants, launching, nodes, quiesce, recovery, requests
from .actions import (
    AnyAction,
    CommitManifest,
    DeleteCheckpoint,
    LaunchGroup,
    PersistStep,
    Reason,
    ReleaseNode,
    RequestNodes,
    StageStep,
)
from .context import StepContext
from .events import (
    ActionFailed,
    ActionSucceeded,
    ActionUnknown,
    AdjustRequested,
    AnyEvent,
    CancelRequested,
    CheckpointRefused,
    ControllerStarted,
    FaultInjected,
    GroupStopped,
    HangDetected,
    HeartbeatReceived,
    HeartbeatsLost,
    HeartbeatsRestored,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    PersistFailed,
    PreemptionNoticed,
    ResizeRequested,
    ResumeRequested,
    ShardPersisted,
    StepCompleted,
    StragglerDetected,
    SuspendRequested,
    Tick,
    WorkerExited,
)
from .state import JobState

FINISH_RETRY_S = 5.0


class Controller:
    """One job. `state` is None until JobSubmitted, then one object for ever; only read it."""

    def __init__(self, state: JobState | None = None) -> None:
        """`state`: go on from there, as a snapshot has kept it."""
        self._state = state

    @property
    def state(self) -> JobState:
        """Read-only. AssertionError before JobSubmitted."""
        assert self._state is not None, "the first event of a job is JobSubmitted"
        return self._state

    @property
    def submitted(self) -> bool:
        return self._state is not None

    def next_deadline_ns(self) -> int | None:
        """When a Tick is due; None: only events can change anything."""
        if self._state is None:
            return None
        # What is due already has been seen in the step that brought the time up to here.
        now_ns = self._state.now_ns
        return min((at for at in self._state.timers.values() if at > now_ns), default=None)

    def step(self, now_ns: int, event: AnyEvent) -> tuple[AnyAction, ...]:
        """Take a fact in. Same state, time and event: same actions. Raises AssertionError (broken
        invariant, illegal move) only for bugs of ours."""
        if isinstance(event, HeartbeatReceived):
            return ()
        if isinstance(event, JobSubmitted):
            assert self._state is None, "a job is submitted once"
            return self._submit(now_ns, event)
        state = self.state
        state.now_ns = now_ns = max(now_ns, state.now_ns)
        ctx = StepContext(state, now_ns)
        if state.terminal:
            self._after_the_end(ctx, event)
        else:
            _NOTE.get(type(event), _ignore)(ctx, event)
            if isinstance(event, StepCompleted) and event.step_s > 0:
                state.step_s = event.step_s
            _fire(ctx)
            self._settle(ctx)
        invariants.check(state)
        return tuple(ctx.actions)

    def _submit(self, now_ns: int, event: JobSubmitted) -> tuple[AnyAction, ...]:
        job = job_from_mapping(event.spec, "the journal")
        self._state = JobState(
            job, event.job_id, now_ns, now_ns, checkpoint_path=event.checkpoint_path
        )
        self._state.needs_placement = True
        self._state.intent = "suspend" if job.spec.suspend else "run"
        ctx = StepContext(self._state, now_ns)
        self._settle(ctx)
        return tuple(ctx.actions)

    def _settle(self, ctx: StepContext) -> None:
        """Do what the state asks for. Each look finds for itself whether there is work."""
        for look in _LOOKS:
            if not ctx.state.terminal:
                look(ctx)

    def _after_the_end(self, ctx: StepContext, event: AnyEvent) -> None:
        """Only FinishJob has a future."""
        state = ctx.state
        match event:
            case ControllerStarted():
                state.incarnation = event.incarnation
                if state.finish_action is not None:
                    completion.finish_again(ctx, "its result was lost")
            case ActionSucceeded() if event.action_id == state.finish_action:
                state.finish_action = None
                state.inflight.clear()
            case ActionFailed() if event.action_id == state.finish_action:
                ctx.note(f"the job's end was not carried out: {event.detail}; trying again")
                ctx.arm("finish", FINISH_RETRY_S)
            case Tick() if ctx.due("finish"):
                completion.finish_again(ctx, "once more")
            case _:
                pass


# -- what the state asks for ------------------------------------------------------------------
def _conclude(ctx: StepContext) -> None:
    """A generation has ended on all its nodes."""
    state, stop = ctx.state, ctx.state.stop
    if stop is None or stop.waiting:
        return
    why_fail = recovery.conclude(ctx)
    if stop.purpose == "finish" and state.intent == "run":
        completion.trained(ctx, stop)
    elif state.intent == "run" and why_fail:
        # Only now: a job that is suspended or cancelled does not end by this error.
        state.traceback = state.incidents[-1].traceback
        budget = "budget is used up" in why_fail
        completion.end_early(ctx, "failed", "budget" if budget else "user-error", why_fail)
    else:
        state.needs_placement = True
        if state.intent == "run" and state.phase == "suspending":
            ctx.move("recovering", "resume", "resumed before it was suspended")


_LOOKS: tuple[Callable[[StepContext], None], ...] = (
    _conclude,
    requests.follow_intent,
    requests.planned,
    quiesce.drop,
    completion.check_drain,
    nodes.recall_promised,
    nodes.request_missing,
    launching.place,
    completion.park,
    nodes.release_surplus,
)


# -- facts ------------------------------------------------------------------------------------
def _ignore(ctx: StepContext, event: Any) -> None:
    """Decides nothing."""


def _chaos(ctx: StepContext, event: FaultInjected) -> None:
    ctx.state.injected_faults[event.node] = ctx.now_ns


def _joined(ctx: StepContext, event: NodeJoined) -> None:
    broken = nodes.joined(ctx, event)
    if broken:
        stop = recovery.interrupt(ctx, "failure", Reason("infrastructure", broken))
        if stop is not None:
            stop.launch_failure = (event.node, broken)
    launching.all_launched(ctx)


def _lost(ctx: StepContext, event: NodeLost) -> None:
    cause = nodes.lost(ctx, event)
    if cause:
        recovery.lost_member(ctx, event.node, cause, event.detail or event.cause)


def _exited(ctx: StepContext, event: WorkerExited) -> None:
    if event.generation != ctx.state.generation:
        ctx.note(f"an exit of generation {event.generation} on {event.node}: not the current one")
        return
    recovery.worker_exited(ctx, event.node, event.exit)


def _stopped(ctx: StepContext, event: GroupStopped) -> None:
    state = ctx.state
    state.inflight.pop(event.action_id, None)
    if event.generation == state.generation and state.active:
        if state.stop is not None and event.node in state.stop.waiting:
            recovery.group_stopped(ctx, event)
    else:
        nodes.stale_stopped(ctx, event)


def _hang(ctx: StepContext, event: HangDetected) -> None:
    state = ctx.state
    if event.generation != state.generation or not state.active or state.stop is not None:
        return
    reason = Reason("hang", f"no progress: {event.evidence}")
    stop = recovery.interrupt(ctx, "failure", reason, stacks=True)
    if stop is not None:
        stop.hang = (event.ranks, event.evidence)


def _straggler(ctx: StepContext, event: StragglerDetected) -> None:
    ctx.note(f"{event.node} is slow: {event.evidence}")


def _succeeded(ctx: StepContext, event: ActionSucceeded) -> None:
    action = ctx.state.inflight.pop(event.action_id, None)
    match action:
        case LaunchGroup():
            launching.launched(ctx, action)
        case RequestNodes():
            nodes.request_granted(ctx, action, event)
        case CommitManifest():
            checkpoints.commit_succeeded(ctx, action)
        case DeleteCheckpoint():
            checkpoints.deleted(ctx, action)
        case StageStep():
            quiesce.answered(ctx, action)
        case _:
            pass


def _failed(ctx: StepContext, event: ActionFailed) -> None:
    state = ctx.state
    action = state.inflight.pop(event.action_id, None)
    match action:
        case LaunchGroup() if state.launching.get(action.node) == action.action_id:
            _launch_failed(ctx, action.node, event.detail or "no detail given")
        case RequestNodes():
            nodes.request_failed(ctx, action, event.detail)
        case ReleaseNode():
            nodes.release_failed(ctx, action, event.detail)
        case CommitManifest():
            checkpoints.commit_failed(ctx, action, event.detail)
        case DeleteCheckpoint():
            ctx.note(f"step {action.step} was not deleted: {event.detail}")
            checkpoints.deleted(ctx, action)
        case StageStep():
            quiesce.answered(ctx, action, event.detail)
        case PersistStep() if state.drain is not None:
            ctx.note(f"{action.node} did not write step {action.step}: {event.detail}")
            ctx.arm("drain", completion.PERSIST_RETRY_S)
        case _:
            pass


def _unknown(ctx: StepContext, event: ActionUnknown) -> None:
    """The link broke before the result came. What concerns a node is said again when it comes back
    (membership.joined); the rest is repeated, it is idempotent."""
    action = ctx.state.inflight.get(event.action_id)
    if isinstance(
        action, ReleaseNode | CommitManifest | DeleteCheckpoint | StageStep | PersistStep
    ):
        _failed(ctx, ActionFailed(action_id=event.action_id, detail="result unknown"))
    elif isinstance(action, RequestNodes):
        ctx.state.inflight.pop(event.action_id)
        nodes.request_unknown(ctx)
    elif action is not None:
        ctx.state.inflight.pop(event.action_id)


def _launch_failed(ctx: StepContext, node: str, detail: str) -> None:
    reason = Reason("infrastructure", f"{node} could not start its workers: {detail}")
    stop = recovery.interrupt(ctx, "failure", reason)
    if stop is not None and stop.launch_failure is None:
        stop.launch_failure = (node, detail)


def _refused(ctx: StepContext, event: CheckpointRefused) -> None:
    if checkpoints.refused(ctx, event):
        stop = recovery.interrupt(ctx, "failure", Reason("checkpoint", event.detail))
        if stop is not None:
            stop.refused = event.detail


def _started(ctx: StepContext, event: ControllerStarted) -> None:
    state = ctx.state
    first = state.incarnation == 0 and event.incarnation <= 1
    state.incarnation = event.incarnation
    quiesce.end(ctx)
    if state.num_launches == 0 and event.committed:
        # Directories of an earlier job at the same path: never write into one of them.
        state.generation = max(state.generation, *(f.generation for f in event.committed))
    if not first:
        for lost in nodes.controller_started(ctx, event.nodes):
            _lost(ctx, lost)
    checkpoints.observed(ctx, event.committed)
    if state.drain is not None and not first:
        ctx.arm("persist", completion.final_timeout_s(state))
        ctx.arm("drain", completion.PERSIST_RETRY_S)


def _fire(ctx: StepContext) -> None:
    """Deadlines. Those that only open a way (gather, grow, replacement, persist, preempt) are read
    where they matter."""
    state = ctx.state
    if ctx.due("rejoin"):
        for lost in nodes.rejoin_expired(ctx):
            _lost(ctx, lost)
    if ctx.due("stop") and state.stop is not None:
        ctx.disarm("stop")
        for name in list(state.stop.waiting):
            detail = f"did not stop its workers in {limits.STOP_TIMEOUT_S:g} s"
            _lost(ctx, NodeLost(node=name, cause="no-stop", detail=detail))
    if ctx.due("launch"):
        launching.say_again(ctx)
    if ctx.due("launch-again") and state.launching:
        ctx.disarm("launch-again")
        _launch_failed(ctx, next(iter(state.launching)), "it did not answer")
    if ctx.due("deadline") and state.intent == "run":
        ctx.disarm("deadline")
        limit = state.job.spec.active_deadline_s
        state.intent, state.intent_reason = (
            "deadline",
            f"it has run for its activeDeadline of {limit:g} s",
        )
    if ctx.due("cadence") and state.phase == "running":
        completion.cadence_due(ctx)
    for name, act in _DUE:
        if ctx.due(name):
            act(ctx)


_DUE: tuple[tuple[str, Callable[[StepContext], None]], ...] = (
    ("request", lambda ctx: ctx.disarm("request")),
    ("expect", nodes.expectation_expired),
    ("release", nodes.release_again),
    ("commit", checkpoints.retry_commits),
    ("drain", completion.ask),
)

_NOTE: dict[type, Callable[[StepContext, Any], None]] = {
    ResizeRequested: requests.resize,
    AdjustRequested: requests.adjust,
    SuspendRequested: requests.suspend,
    ResumeRequested: requests.resume,
    CancelRequested: requests.cancel,
    FaultInjected: _chaos,
    NodeJoined: _joined,
    NodeLost: _lost,
    PreemptionNoticed: lambda ctx, event: nodes.preemption_noticed(ctx, event),
    WorkerExited: _exited,
    StepCompleted: lambda ctx, event: launching.advanced(ctx, event),
    HangDetected: _hang,
    StragglerDetected: _straggler,
    HeartbeatsLost: lambda ctx, event: recovery.all_silent(ctx, event),
    HeartbeatsRestored: lambda ctx, event: recovery.heard_again(ctx, event),
    ActionSucceeded: _succeeded,
    ActionFailed: _failed,
    ActionUnknown: _unknown,
    GroupStopped: _stopped,
    ShardPersisted: lambda ctx, event: checkpoints.shard_persisted(ctx, event),
    PersistFailed: lambda ctx, event: completion.persist_failed(ctx, event),
    CheckpointRefused: _refused,
    ControllerStarted: _started,
}
