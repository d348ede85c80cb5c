"""One step of the controller: the state, the time, and the actions decided so far.

It holds the few operations that change state anywhere in the core (emit, move, intent, timers). One
StepContext lives for one call of `Controller.step`.
"""

from __future__ import annotations

from typing import TypeVar

from .. import limits
from ..api.v1alpha1 import Recovery, TrainingJob
from .actions import Action, AnyAction, LaunchGroup, Reason, ReasonCode
from .state import Hold, Intent, JobState, TimerName
from .transitions import JobPhase, check_transition

SECOND_NS = 1_000_000_000
MAX_NOTES = 200
MAX_INCIDENTS = 500

A = TypeVar("A", bound=Action)


def stop_timeout_s(job: TrainingJob) -> float:
    """Seconds that a node may take to confirm that its workers have ended."""
    return limits.STOP_TIMEOUT_GPU_S if job.spec.resources.num_gpus else limits.STOP_TIMEOUT_S


def recovery_of(job: TrainingJob) -> Recovery:
    """spec.recovery. The heartbeats of a large job are further apart, and its nodes are lost later:
    all agents together send no more than a controller can take."""
    recovery = job.spec.recovery
    interval_s = job.spec.nodes.max / limits.MAX_HEARTBEATS_PER_S
    if interval_s <= recovery.heartbeat_interval_s:
        return recovery
    timeout_s = max(recovery.heartbeat_timeout_s, limits.MIN_HEARTBEATS_MISSED * interval_s)
    later = {"heartbeat_interval_s": interval_s, "heartbeat_timeout_s": timeout_s}
    return recovery.model_copy(update=later)


def seconds(value: float) -> int:
    """Nanoseconds."""
    return round(value * SECOND_NS)


_SAME = sorted({*LaunchGroup.__struct_fields__} - {*Action.__struct_fields__})
"""Fields that a launch keeps when it is sent again."""


class StepContext:
    """Arguments of every handler."""

    def __init__(self, state: JobState, now_ns: int) -> None:
        self.state = state
        self.now_ns = now_ns
        self.actions: list[AnyAction] = []

    def emit(
        self, kind: type[A], reason: Reason, generation: int | None = None, **fields: object
    ) -> int:
        """Decide on an action; returns its id."""
        state = self.state
        action_id = state.next_action_id
        state.next_action_id += 1
        chosen = state.generation if generation is None else generation
        action = kind(action_id=action_id, generation=chosen, reason=reason, **fields)
        state.inflight[action_id] = action  # type: ignore[assignment]
        self.actions.append(action)  # type: ignore[arg-type]
        return action_id

    def reemit(self, action: LaunchGroup, reason: Reason) -> int:
        """The same launch under a new id, for a node that may not have received it."""
        same = {name: getattr(action, name) for name in _SAME}
        return self.emit(LaunchGroup, reason, action.generation, **same)

    def move(self, phase: JobPhase, code: ReasonCode, text: str) -> None:
        """Enter another phase, or the same one with a new reason. Raises IllegalTransition."""
        if phase != self.state.phase:
            check_transition(self.state.phase, phase)
        self.state.phase = phase
        self.state.reason = Reason(code, text)

    def want(self, intent: Intent, reason: str = "") -> None:
        """Follow another intent. Only a user's resume ends a hold."""
        self.state.intent = intent
        self.state.intent_reason = reason or self.state.intent_reason
        if intent == "run":
            self.state.hold = None

    def hold(self, text: str, reason: str = "", *, ignored: bool = False) -> None:
        """Suspend the job until a user decides how it continues."""
        self.state.hold = Hold(self.now_ns, text, ignored)
        self.want("suspend", reason or text)

    def place(self, wanted: bool = True) -> None:
        """Begin a new generation if one is wanted; no workers run."""
        self.state.needs_placement = wanted

    def fence(self, generation: int) -> None:
        """This one, and those before it, are never launched again."""
        self.state.generation = max(self.state.generation, generation)

    def replace_job(self, job: TrainingJob) -> None:
        self.state.job = job

    def note(self, text: str) -> None:
        self.state.notes.append((self.now_ns, text))
        del self.state.notes[:-MAX_NOTES]

    # -- timers: name -> due time; a Tick comes when one is due ----------------------------------
    def arm(self, name: TimerName, after_s: float) -> None:
        """Start a timer, or start it again."""
        self.state.timers[name] = self.now_ns + seconds(after_s)

    def arm_once(self, name: TimerName, after_s: float) -> None:
        """Start a timer unless it runs."""
        if name not in self.state.timers:
            self.arm(name, after_s)

    def disarm(self, *names: TimerName) -> None:
        for name in names:
            self.state.timers.pop(name, None)

    def due(self, name: TimerName) -> bool:
        at = self.state.timers.get(name)
        return at is not None and at <= self.now_ns

    def left_s(self, name: TimerName) -> float | None:
        """Time until it is due; None: it does not run."""
        at = self.state.timers.get(name)
        return None if at is None else max(0, at - self.now_ns) / SECOND_NS
