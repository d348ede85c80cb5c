"""The incidents that led to this start of a script, which it may write into its tracker."""

from __future__ import annotations

import os

import msgspec

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.environment import INCIDENTS
from holdfast.orchestrator.protocol.facts import LaunchIncident


def last_incident() -> LaunchIncident | None:
    """The incident that led to this start of the script; None at the first start, and outside
    Holdfast. The same on all ranks.

        from holdfast.integrations import last_incident

        incident = last_incident()
        if incident is not None:
            writer.add_text("incidents", f"{incident.title}, after step {incident.last_step}", step)

    See docs/user/trackers.md for its fields. Raises UserError if spec.env has made
    HOLDFAST_INCIDENTS unreadable.
    """
    text = os.environ.get(INCIDENTS, "")
    if not text:
        return None
    try:
        incidents = msgspec.json.decode(text, type=tuple[LaunchIncident, ...])
    except msgspec.MsgspecError as error:
        got, fix = f"{text[:80]} ({error})", f"remove {INCIDENTS} from spec.env"
        raise UserError.of(INCIDENTS, got, "the list that Holdfast sets", fix) from None
    return incidents[-1] if incidents else None
