"""What is worth an Event: the differences between two views of a job. Pure.

Owns: that choice and its words. Must not: write anything.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from holdfast.orchestrator.runtime.observe.view import Incident, JobView

Severity = Literal["Normal", "Warning"]
_CLASSES = {
    "user": "UserError", "infrastructure": "InfrastructureFailure", "preemption": "Preemption",
    "hang": "Hang", "resize": "Resize", "suspend": "Suspend",
}  # fmt: skip
PLANNED = ("resize", "suspend", "cancel", "finish", "deadline")


class EventDraft(NamedTuple):
    severity: Severity
    reason: str
    message: str


def new_events(before: JobView | None, after: JobView) -> list[EventDraft]:
    """`before` None: an operator has just taken the job over; the past is told already."""
    if before is None:
        return []
    found: list[EventDraft] = []
    old = {one.number: one for one in before.incidents}
    for one in after.incidents:
        known = old.get(one.number)
        if _tellable(one, after) and not (known is not None and _tellable(known, before)):
            found.append(_opened(one))
        was_over = one.number in old and "total" in old[one.number].seconds
        if "total" in one.seconds and not was_over:
            found.append(_closed(one))
    if after.generation > before.generation:
        workers = f"{after.world_size} workers" if after.world_size != 1 else "1 worker"
        found.append(
            EventDraft("Normal", "GenerationStarted", f"generation {after.generation}: {workers}, "
                 f"{after.mesh or 'no mesh'}")
        )  # fmt: skip
    if after.storage_problem and after.storage_problem != before.storage_problem:
        found.append(EventDraft("Warning", "CheckpointFailed", after.storage_problem))
    if after.state != before.state:
        found += _moved(after)
    return found


def _tellable(one: Incident, view: JobView) -> bool:
    """Once it is known what is done about it, or that nothing can be done for now."""
    waits = view.state in ("pending", "suspended", "failed", "cancelled")
    return bool(one.title) and (bool(one.decision) or waits)


def _opened(one: Incident) -> EventDraft:
    severity: Severity = "Normal" if one.failure_class in PLANNED else "Warning"
    text = f"incident {one.number}: {one.title}"
    if one.evidence and one.evidence not in one.title:
        text += f" ({one.evidence})"
    if one.rehearsal:
        text += " [rehearsal]"
    if one.decision:
        text += f"; {one.decision}"
    return EventDraft(severity, _CLASSES.get(one.failure_class, "Interruption"), text)


def _closed(one: Incident) -> EventDraft:
    text = f"incident {one.number} is over: {one.decision or 'training goes on'}"
    lost = "no finished step lost" if not one.steps_lost else f"{one.steps_lost} steps lost"
    return EventDraft("Normal", "Recovered", f"{text}; {one.seconds['total']:.2f} s, {lost}")


def _moved(after: JobView) -> list[EventDraft]:
    match after.state:
        case "succeeded":
            return [EventDraft("Normal", "Succeeded", after.reason)]
        case "failed":
            return [EventDraft("Warning", "Failed", after.reason)]
        case "cancelled":
            return [EventDraft("Warning", "Cancelled", after.reason)]
        case "suspended":
            return [EventDraft("Normal", "Suspended", after.reason)]
        case "pending":
            return [EventDraft("Normal", "WaitingForNodes", after.reason)]
        case _:
            return []
