"""Converts a JobView to the `.status` of a TrainingJob, and back for the command line. Pure.

Conditions follow the API conventions: each exists from the first status on, `reason` and
`message` are those of this condition. Ready and Progressing describe the present; Suspended,
Succeeded and Failed are for `kubectl wait --for=condition=...`, and the last two are final. A job
that is rejected has Accepted=False: it starts when the cause is gone.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from holdfast.orchestrator.api.v1alpha1.status import (
    MAX_INCIDENTS,
    CheckpointStatus,
    Condition,
    IncidentStatus,
    NodesStatus,
    RequestStatus,
    TrainingJobStatus,
)
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.runtime.observe.view import CheckpointView, Incident, JobPhase, JobView

TRACEBACK_CHARACTERS = 4096
"""The end of the traceback, which names the error. The workers' logs have all of it."""
BUSY = ("starting", "running", "recovering", "finishing", "suspending")

ConditionType = Literal["Ready", "Progressing", "Suspended", "Succeeded", "Failed", "Accepted"]
PHASE_REASONS: dict[JobPhase, str] = {
    **{phase: phase.capitalize() for phase in get_args(JobPhase)},
    "pending": "WaitingForNodes",
}


HOLD_REASON = "CheckpointsUnusable"
"""Reason of a suspended job that waits for a user's decision about its checkpoints."""


NO_OPERATOR = "the operator has ended: workers train on, and no fault is repaired until one is back"
NOT_SEEN = "the operator has not looked at this job yet"


class ConditionState(NamedTuple):
    """Phase, reason and message of all conditions. A job without a controller has one, too: its
    spec is invalid, or it is suspended, for example."""

    state: JobPhase
    reason: str
    """CamelCase."""
    message: str
    accepted: bool = True
    """False: the spec or the cluster has to be changed before the job can start. It may still."""


ACCEPTED = ConditionState("pending", "Accepted", "the operator is starting the job's controller")


class StatusContext(NamedTuple):
    """Parts of a status besides the view."""

    name: str
    generation: int
    """metadata.generation of the object."""
    desired: int
    now_ns: int
    problems: tuple[tuple[str, str], ...] = ()
    """(CamelCase reason, sentence): why pods do not start."""
    request: RequestStatus | None = None
    leaving: bool = False
    """The operator ends, and whether another one follows is not known."""


def status_of(view: JobView, context: StatusContext, before: Sequence[Document] = ()) -> Document:
    """`before`: the current conditions; those that do not change keep their transition time."""
    ready = sum(node.state == "member" for node in view.nodes)
    finished = view.state in TERMINAL
    desired = 0 if finished or view.state in ("suspended", "suspending") else context.desired
    spares = sum(node.state == "spare" for node in view.nodes)
    summary = f"{ready}/{desired}"
    nodes = NodesStatus(ready=ready, desired=desired, summary=summary, spares=spares)
    state = _condition_state(view, context)
    status = TrainingJobStatus(
        conditions=conditions(state, context, before),
        observed_generation=context.generation,
        state=view.state,
        reason=state.message,
        job_id=view.job_id or None,
        nodes=nodes,
        replicas=ready,
        selector=names.selector(context.name),
        world_size=view.world_size,
        gpus_per_worker=view.gpus_per_worker,
        mesh=view.mesh or None,
        strategy=view.strategy or None,
        generation=view.generation,
        step=view.step if view.step >= 0 else None,
        total_steps=view.total_steps or None,
        step_s=_rounded(view.step_s),
        tokens_per_second=_rounded(view.tokens_per_s, 1),
        loss=_rounded(view.loss),
        restarts=view.relaunches,
        restarts_by_class=dict(view.restarts),
        goodput=f"{100 * view.goodput:.1f}%",
        ledger={cause: round(seconds, 2) for cause, seconds in view.ledger.items()},
        start_time=_time(view.submitted_ns),
        completion_time=_time(view.finished_ns),
        memory_step=view.memory_step if view.memory_step >= 0 else None,
        last_checkpoint=_checkpoint(view),
        checkpoint_path=view.checkpoint_path or None,
        storage_problem=view.storage_problem or None,
        request=context.request,
        incidents=[_incident(incident) for incident in view.incidents[-MAX_INCIDENTS:]],
        traceback=view.traceback[-TRACEBACK_CHARACTERS:] or None,
    )
    return _document(status)


def status_without_controller(
    state: ConditionState,
    context: StatusContext,
    before: Sequence[Document] = (),
    prior: Document | None = None,
) -> Document:
    """Status of a job that is suspended or whose controller cannot be started. `prior`: fields that
    its last controller wrote, which are kept."""
    status = _document(TrainingJobStatus(
        conditions=conditions(state, context, before), observed_generation=context.generation,
        state=state.state, reason=state.message, nodes=NodesStatus(summary="0/0"), replicas=0,
        selector=names.selector(context.name),
    ))  # fmt: skip
    return {**status, **(prior or {})}


def _document(status: TrainingJobStatus) -> Document:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


# -- conditions -------------------------------------------------------------------------------
def conditions(
    state: ConditionState, context: StatusContext, before: Sequence[Document]
) -> list[Condition]:
    old = {entry["type"]: entry for entry in before}
    now = datetime.datetime.fromtimestamp(context.now_ns / SECOND_NS, datetime.UTC).replace(
        microsecond=0
    )
    built = []
    for kind in get_args(ConditionType):
        aspect = _condition(kind, state)
        present = kind in ("Ready", "Progressing") and state.state in (*BUSY, "pending")
        if context.leaving and present:
            aspect = _Aspect("Unknown", "NoOperator", NO_OPERATOR)
        last = old.get(kind)
        since = now
        if last is not None and last["status"] == aspect.status:
            since = datetime.datetime.fromisoformat(last["lastTransitionTime"])
        built.append(Condition(
            type=kind, status=aspect.status, observed_generation=context.generation,
            last_transition_time=since, reason=aspect.reason, message=aspect.message,
        ))  # fmt: skip
    return built


class _Aspect(NamedTuple):
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def _condition(kind: ConditionType, state: ConditionState) -> _Aspect:
    """A condition has the reason and message of the phase if it is about that, else its own."""
    phase = state.state
    true = {
        "Ready": phase in ("running", "finishing"),
        "Progressing": state.accepted and (phase in BUSY or phase == "pending"),
        "Suspended": phase == "suspended",
        "Succeeded": phase == "succeeded",
        "Failed": phase in ("failed", "cancelled"),
        "Accepted": state.accepted,
    }[kind]
    aspect = _Aspect("True" if true else "False", state.reason, state.message)
    if kind == "Accepted" and true:
        return aspect._replace(reason="Accepted", message="the operator runs this job")
    if true or kind in ("Ready", "Progressing", "Accepted"):
        return aspect
    if phase in TERMINAL:
        return aspect._replace(reason=phase.capitalize(), message=f"the job has {_ENDS[phase]}")
    reason, message = _NOT_YET[kind]
    return aspect._replace(reason=reason, message=message)


_ENDS: dict[str, str] = {
    "succeeded": "succeeded", "failed": "failed", "cancelled": "been cancelled",
}  # fmt: skip
_NOT_YET: dict[str, tuple[str, str]] = {
    "Suspended": ("NotSuspended", "the job is not suspended"),
    "Succeeded": ("NotFinished", "the job has not ended"),
    "Failed": ("NotFailed", "the job has not failed"),
}


def _condition_state(view: JobView, context: StatusContext) -> ConditionState:
    """Problems of pods are the reason of a pending job, and part of the message of any other job
    that has not ended."""
    reason, message = PHASE_REASONS[view.state], view.reason
    if view.hold and view.state == "suspended":
        reason = HOLD_REASON
    if context.problems and view.state not in TERMINAL:
        if view.state == "pending":
            reason = context.problems[0][0]
        texts = [text for _code, text in context.problems]
        # The job's own reason may quote a problem.
        message = "; ".join([message, *(text for text in texts if text not in message)])
    return ConditionState(view.state, reason, message[: 8 * 1024])


def state_of(document: Document, state: ConditionState) -> JobPhase:
    """The phase of a job without a controller. The object has it while the operator has not
    reported anything else."""
    if state == ACCEPTED:
        return _state((document.get("status") or {}).get("state"))
    return state.state


def condition(document: Document, kind: ConditionType) -> Document:
    """A condition of a TrainingJob; empty: it does not exist yet."""
    for entry in document.get("status", {}).get("conditions") or ():
        if entry["type"] == kind:
            return dict(entry)
    return {}


# -- parts ------------------------------------------------------------------------------------
def _checkpoint(view: JobView) -> CheckpointStatus | None:
    if not view.checkpoints:
        return None
    newest = view.checkpoints[-1]
    return CheckpointStatus(
        step=newest.step, time=_time(newest.committed_ns), generation=newest.generation,
        size_bytes=newest.num_bytes,
    )  # fmt: skip


def _incident(one: Incident) -> IncidentStatus:
    """Fields of the same names; empty ones are left out."""
    values = {name: getattr(one, name) for name in IncidentStatus.model_fields if name != "time"}
    values |= {
        "seconds": {phase: round(seconds, 3) for phase, seconds in one.seconds.items()},
        "traceback": one.traceback[-TRACEBACK_CHARACTERS:],
    }
    values = {
        name: value
        for name, value in values.items()
        if value not in ("", None) and value is not False
    }
    time = _time(one.at_ns) or datetime.datetime.fromtimestamp(0, datetime.UTC)
    return IncidentStatus(**{"title": "", **values, "time": time})


def _time(wall_ns: int | None) -> datetime.datetime | None:
    if not wall_ns:
        return None
    return datetime.datetime.fromtimestamp(wall_ns / SECOND_NS, datetime.UTC)


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """None for NaN and infinity, which JSON does not have. Rounded, to keep etcd small."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return round(value, digits)


# -- back to a view ---------------------------------------------------------------------------
def view_of(document: Document, now_ns: int) -> JobView:
    """View of a job from the object alone, for the command line."""
    metadata = document["metadata"]
    # A newer operator may write fields that this version does not have.
    status = TrainingJobStatus.model_validate(document.get("status") or {}, extra="ignore")
    view = JobView(
        name=metadata["name"],
        job_id=status.job_id or metadata.get("uid", ""),
        state=_state(status.state),
        reason=(status.reason or "") if status.state else NOT_SEEN,
        submitted_ns=_ns(status.start_time) or _ns_of_text(metadata.get("creationTimestamp")),
        finished_ns=_ns(status.completion_time) or None,
        now_ns=now_ns,
        generation=status.generation or 0,
        world_size=status.world_size or 0,
        gpus_per_worker=status.gpus_per_worker or 0,
        mesh=status.mesh or "",
        strategy=status.strategy or "",
        restarts=dict(status.restarts_by_class),
        relaunches=max(0, (status.generation or 0) - 1),
        step=-1 if status.step is None else status.step,
        total_steps=status.total_steps or 0,
        loss=status.loss,
        step_s=status.step_s or 0.0,
        tokens_per_s=status.tokens_per_second or 0.0,
        memory_step=-1 if status.memory_step is None else status.memory_step,
        checkpoint_path=status.checkpoint_path or "",
        storage_problem=status.storage_problem or "",
        hold=_hold(status),
        incidents=[_incident_view(incident) for incident in status.incidents],
        ledger=dict(status.ledger),
        goodput=float((status.goodput or "0").rstrip("%")) / 100,
        traceback=status.traceback or "",
    )
    if status.last_checkpoint is not None:
        last = status.last_checkpoint
        view.checkpoints = [
            CheckpointView(
                step=last.step,
                generation=last.generation or 0,
                num_bytes=last.size_bytes or 0,
                committed_ns=_ns(last.time),
            )
        ]
    return view


def _hold(status: TrainingJobStatus) -> str:
    held = [c for c in status.conditions if c.type == "Suspended" and c.status == "True"]
    return next((c.message for c in held if c.reason == HOLD_REASON), "")


def _incident_view(one: IncidentStatus) -> Incident:
    fields = one.model_dump(exclude={"time"}, exclude_none=True)
    return msgspec.convert({**fields, "at_ns": _ns(one.time)}, Incident)


def _state(state: str | None) -> JobPhase:
    phases: tuple[JobPhase, ...] = get_args(JobPhase)
    return next((phase for phase in phases if phase == state), "pending")


def _ns(time: datetime.datetime | None) -> int:
    return int(time.timestamp() * SECOND_NS) if time is not None else 0


def _ns_of_text(text: str | None) -> int:
    return _ns(datetime.datetime.fromisoformat(text)) if text else 0
