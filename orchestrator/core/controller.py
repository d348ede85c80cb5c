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
        turn = StepContext(state, now_ns)
        if state.terminal:
            self._after_the_end(turn, event)
        else:
            _NOTE.get(type(event), _ignore)(turn, event)
            if isinstance(event, StepCompleted) and event.step_s > 0:
                state.step_s = event.step_s
            _fire(turn)
            self._settle(turn)
        invariants.check(state)
        return tuple(turn.actions)

    def _submit(self, now_ns: int, event: JobSubmitted) -> tuple[AnyAction, ...]:
        job = job_from_mapping(event.spec, "the journal")
        self._state = JobState(
            job, event.job_id, now_ns, now_ns, checkpoint_path=event.checkpoint_path
        )
        self._state.placing = True
        self._state.intent = "suspend" if job.spec.suspend else "run"
        turn = StepContext(self._state, now_ns)
        self._settle(turn)
        return tuple(turn.actions)

    def _settle(self, turn: StepContext) -> None:
        """Do what the state asks for. Each look finds for itself whether there is work."""
        for look in _LOOKS:
            if not turn.state.terminal:
                look(turn)

    def _after_the_end(self, turn: StepContext, event: AnyEvent) -> None:
        """Only FinishJob has a future."""
        state = turn.state
        match event:
            case ControllerStarted():
                state.incarnation = event.incarnation
                if state.finish_action is not None:
                    completion.finish_again(turn, "its result was lost")
            case ActionSucceeded() if event.action_id == state.finish_action:
                state.finish_action = None
                state.inflight.clear()
            case ActionFailed() if event.action_id == state.finish_action:
                turn.note(f"the job's end was not carried out: {event.detail}; trying again")
                turn.arm("finish", FINISH_RETRY_S)
            case Tick() if turn.due("finish"):
                completion.finish_again(turn, "once more")
            case _:
                pass


# -- what the state asks for ------------------------------------------------------------------
def _conclude(turn: StepContext) -> None:
    """A generation has ended on all its nodes."""
    state, stop = turn.state, turn.state.stop
    if stop is None or stop.waiting:
        return
    why_fail = recovery.conclude(turn)
    if stop.purpose == "finish" and state.intent == "run":
        completion.trained(turn, stop)
    elif state.intent == "run" and why_fail:
        # Only now: a job that is suspended or cancelled does not end by this error.
        state.traceback = state.incidents[-1].traceback
        budget = "budget is used up" in why_fail
        completion.end_early(turn, "failed", "budget" if budget else "user-error", why_fail)
    else:
        state.placing = True
        if state.intent == "run" and state.phase == "suspending":
            turn.move("recovering", "resume", "resumed before it was suspended")


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
def _ignore(turn: StepContext, event: Any) -> None:
    """Decides nothing."""


def _chaos(turn: StepContext, event: FaultInjected) -> None:
    turn.state.rehearsals[event.node] = turn.now


def _joined(turn: StepContext, event: NodeJoined) -> None:
    broken = nodes.joined(turn, event)
    if broken:
        stop = recovery.interrupt(turn, "failure", Reason("infrastructure", broken))
        if stop is not None:
            stop.launch_failure = (event.node, broken)
    launching.all_launched(turn)


def _lost(turn: StepContext, event: NodeLost) -> None:
    cause = nodes.lost(turn, event)
    if cause:
        recovery.lost_member(turn, event.node, cause, event.detail or event.cause)


def _exited(turn: StepContext, event: WorkerExited) -> None:
    if event.generation != turn.state.generation:
        turn.note(f"an exit of generation {event.generation} on {event.node}: not the current one")
        return
    recovery.worker_exited(turn, event.node, event.exit)


def _stopped(turn: StepContext, event: GroupStopped) -> None:
    state = turn.state
    state.inflight.pop(event.action_id, None)
    if event.generation == state.generation and state.active:
        if state.stop is not None and event.node in state.stop.waiting:
            recovery.group_stopped(turn, event)
    else:
        nodes.stale_stopped(turn, event)


def _hang(turn: StepContext, event: HangDetected) -> None:
    state = turn.state
    if event.generation != state.generation or not state.active or state.stop is not None:
        return
    reason = Reason("hang", f"no progress: {event.evidence}")
    stop = recovery.interrupt(turn, "failure", reason, stacks=True)
    if stop is not None:
        stop.hang = (event.ranks, event.evidence)


def _straggler(turn: StepContext, event: StragglerDetected) -> None:
    turn.note(f"{event.node} is slow: {event.evidence}")


def _succeeded(turn: StepContext, event: ActionSucceeded) -> None:
    action = turn.state.inflight.pop(event.action_id, None)
    match action:
        case LaunchGroup():
            launching.launched(turn, action)
        case RequestNodes():
            nodes.request_granted(turn, action, event)
        case CommitManifest():
            checkpoints.commit_succeeded(turn, action)
        case DeleteCheckpoint():
            checkpoints.deleted(turn, action)
        case StageStep():
            quiesce.answered(turn, action)
        case _:
            pass


def _failed(turn: StepContext, event: ActionFailed) -> None:
    state = turn.state
    action = state.inflight.pop(event.action_id, None)
    match action:
        case LaunchGroup() if state.launching.get(action.node) == action.action_id:
            _launch_failed(turn, action.node, event.detail or "no detail given")
        case RequestNodes():
            nodes.request_failed(turn, action, event.detail)
        case ReleaseNode():
            nodes.release_failed(turn, action, event.detail)
        case CommitManifest():
            checkpoints.commit_failed(turn, action, event.detail)
        case DeleteCheckpoint():
            turn.note(f"step {action.step} was not deleted: {event.detail}")
            checkpoints.deleted(turn, action)
        case StageStep():
            quiesce.answered(turn, action, event.detail)
        case PersistStep() if state.drain is not None:
            turn.note(f"{action.node} did not write step {action.step}: {event.detail}")
            turn.arm("drain", completion.PERSIST_RETRY_S)
        case _:
            pass


def _unknown(turn: StepContext, event: ActionUnknown) -> None:
    """The link broke before the result came. What concerns a node is said again when it comes back
    (membership.joined); the rest is repeated, it is idempotent."""
    action = turn.state.inflight.get(event.action_id)
    if isinstance(
        action, ReleaseNode | CommitManifest | DeleteCheckpoint | StageStep | PersistStep
    ):
        _failed(turn, ActionFailed(action_id=event.action_id, detail="result unknown"))
    elif isinstance(action, RequestNodes):
        turn.state.inflight.pop(event.action_id)
        nodes.request_unknown(turn)
    elif action is not None:
        turn.state.inflight.pop(event.action_id)


def _launch_failed(turn: StepContext, node: str, detail: str) -> None:
    reason = Reason("infrastructure", f"{node} could not start its workers: {detail}")
    stop = recovery.interrupt(turn, "failure", reason)
    if stop is not None and stop.launch_failure is None:
        stop.launch_failure = (node, detail)


def _refused(turn: StepContext, event: CheckpointRefused) -> None:
    if checkpoints.refused(turn, event):
        stop = recovery.interrupt(turn, "failure", Reason("checkpoint", event.detail))
        if stop is not None:
            stop.refused = event.detail


def _started(turn: StepContext, event: ControllerStarted) -> None:
    state = turn.state
    first = state.incarnation == 0 and event.incarnation <= 1
    state.incarnation = event.incarnation
    quiesce.end(turn)
    if state.launches == 0 and event.committed:
        # Directories of an earlier job at the same path: never write into one of them.
        state.generation = max(state.generation, *(f.generation for f in event.committed))
    if not first:
        for lost in nodes.controller_started(turn, event.nodes):
            _lost(turn, lost)
    checkpoints.observed(turn, event.committed)
    if state.drain is not None and not first:
        turn.arm("persist", completion.final_timeout_s(state))
        turn.arm("drain", completion.PERSIST_RETRY_S)


def _fire(turn: StepContext) -> None:
    """Deadlines. Those that only open a way (gather, grow, replacement, persist, preempt) are read
    where they matter."""
    state = turn.state
    if turn.due("rejoin"):
        for lost in nodes.rejoin_expired(turn):
            _lost(turn, lost)
    if turn.due("stop") and state.stop is not None:
        turn.disarm("stop")
        for name in list(state.stop.waiting):
            detail = f"did not stop its workers in {limits.STOP_TIMEOUT_S:g} s"
            _lost(turn, NodeLost(node=name, cause="no-stop", detail=detail))
    if turn.due("launch"):
        launching.say_again(turn)
    if turn.due("launch-again") and state.launching:
        turn.disarm("launch-again")
        _launch_failed(turn, next(iter(state.launching)), "it did not answer")
    if turn.due("deadline") and state.intent == "run":
        turn.disarm("deadline")
        limit = state.job.spec.active_deadline_s
        state.intent, state.asked = "deadline", f"it has run for its activeDeadline of {limit:g} s"
    if turn.due("cadence") and state.phase == "running":
        completion.cadence_due(turn)
    for name, act in _DUE:
        if turn.due(name):
            act(turn)


_DUE: tuple[tuple[str, Callable[[StepContext], None]], ...] = (
    ("request", lambda turn: turn.disarm("request")),
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
    PreemptionNoticed: lambda turn, event: nodes.preemption_noticed(turn, event),
    WorkerExited: _exited,
    StepCompleted: lambda turn, event: launching.advanced(turn, event),
    HangDetected: _hang,
    StragglerDetected: _straggler,
    HeartbeatsLost: lambda turn, event: recovery.all_silent(turn, event),
    HeartbeatsRestored: lambda turn, event: recovery.heard_again(turn, event),
    ActionSucceeded: _succeeded,
    ActionFailed: _failed,
    ActionUnknown: _unknown,
    GroupStopped: _stopped,
    ShardPersisted: lambda turn, event: checkpoints.shard_persisted(turn, event),
    PersistFailed: lambda turn, event: completion.persist_failed(turn, event),
    CheckpointRefused: _refused,
    ControllerStarted: _started,
}
