"""The incidents that led to this start of a script, and their notes in its trackers.

A start writes its own incidents, on the rank that logs, after its first step: then it is known what
they cost. A note that is written again has the same name, so it replaces the first one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.protocol.environment import INCIDENTS
from holdfast.orchestrator.protocol.facts import LaunchIncident

TEXT_TAG = "holdfast/incidents"
"""In TensorBoard."""


def last_incident() -> LaunchIncident | None:
    """The incident that led to this start of the script; None at the first start, and outside
    Holdfast. The same on all ranks.

        from holdfast.integrations import last_incident

        incident = last_incident()
        if incident is not None:
            writer.add_text("incidents", f"{incident.title}, after step {incident.last_step}", step)

    See docs/user/script.md for its fields. Raises UserError if spec.env has made HOLDFAST_INCIDENTS
    unreadable.
    """
    found = launch_incidents()
    return found[-1] if found else None


def launch_incidents() -> tuple[LaunchIncident, ...]:
    """Oldest first; more than one if no step was finished between them."""
    text = os.environ.get(INCIDENTS, "")
    if not text:
        return ()
    try:
        return msgspec.json.decode(text, type=tuple[LaunchIncident, ...])
    except msgspec.MsgspecError as error:
        got, fix = f"{text[:80]} ({error})", f"remove {INCIDENTS} from spec.env"
        raise UserError(str(Problem(INCIDENTS, got, "the list that Holdfast sets", fix))) from None


class IncidentNotes:
    """What one start writes into its trackers, once."""

    def __init__(self, began_after: int) -> None:
        """`began_after`: the step after which this start trains; -1: from the beginning."""
        self._began_after, self._pending = began_after, launch_incidents()

    def write(
        self,
        axis: int,
        writers: Iterable[Any] = (),
        mlflow_runs: Iterable[tuple[Any, str]] = (),
    ) -> None:
        """After the first step of this start. W&B and MLflow are those of this process that have an
        active run. `writers`: SummaryWriters of TensorBoard, in which the note is at `axis`.
        `mlflow_runs`: further ones, each a client and the id of a run."""
        incidents, self._pending = self._pending, ()
        for one in incidents:
            self._write_one(one, axis, writers, mlflow_runs)

    def _write_one(
        self,
        one: LaunchIncident,
        axis: int,
        writers: Iterable[Any],
        mlflow_runs: Iterable[tuple[Any, str]],
    ) -> None:
        now_s = time.time()
        text = describe(one, self._began_after, now_s)
        with _reported("W&B"):
            _to_wandb(one, text, _seconds(one, now_s), steps_lost(one, self._began_after))
        with _reported("MLflow"):
            for client, run_id in [*_active_mlflow_run(), *mlflow_runs]:
                tag(client, run_id, one, text)
        with _reported("TensorBoard"):
            for writer in writers:
                writer.add_text(TEXT_TAG, text, axis)
                writer.flush()


def steps_lost(one: LaunchIncident, began_after: int) -> int | None:
    """None: no step was reported before it."""
    return max(0, one.last_step - began_after) if one.last_step >= 0 else None


def describe(
    one: LaunchIncident, began_after: int | None = None, now_s: float | None = None
) -> str:
    """One line for people. `began_after` and `now_s`: at the end of the first step after it."""
    at = datetime.fromtimestamp(one.at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    drill = ", caused with holdfast chaos" if one.rehearsal else ""
    parts = [f"incident {one.number} at {at} ({one.failure_class}{drill}): {one.title}"]
    if one.decision:
        parts.append(one.decision)
    if one.world_size_after != one.world_size_before:
        parts.append(f"{one.world_size_before} ranks before, {one.world_size_after} now")
    if now_s is not None:
        parts.append(f"{_seconds(one, now_s):.1f} s until the next step was finished")
    lost = steps_lost(one, began_after) if began_after is not None else None
    if lost is not None:
        least = "at least " if one.last_step_at_least else ""
        parts.append(f"{least}{lost} step{'' if lost == 1 else 's'} trained again")
    elif one.last_step >= 0:
        parts.append(f"the last step before it was {one.last_step}")
    return "; ".join(parts)


def tag(client: Any, run_id: str, one: LaunchIncident, text: str) -> None:
    """Writes the note into a run of MLflow."""
    client.set_tag(run_id, f"holdfast.incident.{one.number}", text)


def _seconds(one: LaunchIncident, now_s: float) -> float:
    return max(0.0, now_s - one.at_ns / 1e9)


def _active_mlflow_run() -> list[tuple[Any, str]]:
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    return [(mlflow.MlflowClient(), run.info.run_id)] if mlflow is not None and run else []


def _to_wandb(one: LaunchIncident, text: str, seconds: float, lost: int | None) -> None:
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return
    run.summary[f"holdfast/incident_{one.number}"] = text
    row = {"holdfast/incident": one.number, "holdfast/incident_s": seconds}
    if lost is not None:
        row["holdfast/steps_lost"] = lost
    run.log(row, commit=False)  # with the script's next row, at its step


@contextmanager
def _reported(tracker: str) -> Iterator[None]:
    """A tracker that does not answer is no reason to end the training."""
    try:
        yield
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        print(f"holdfast: the incident is not in {tracker} ({what})", file=sys.stderr)
