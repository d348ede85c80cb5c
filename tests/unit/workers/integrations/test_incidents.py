"""What a script receives of incidents, and how their notes read."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.integrations import last_incident
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.environment import INCIDENTS
from holdfast.orchestrator.protocol.facts import LaunchIncident
from holdfast.workers.integrations.incidents import IncidentNotes, describe

AT_NS = 1_790_000_000 * 10**9


def incident(number: int = 1, **more: Any) -> LaunchIncident:
    given = {
        "at_ns": AT_NS, "failure_class": "infrastructure", "title": "worker 1 was killed",
        "decision": "restart on the same node", "last_step": 41, "world_size_before": 2,
        "world_size_after": 2,
    }  # fmt: skip
    return LaunchIncident(number=number, **{**given, **more})


def pass_on(monkeypatch: pytest.MonkeyPatch, *incidents: LaunchIncident) -> None:
    monkeypatch.setenv(INCIDENTS, msgspec.json.encode(incidents).decode())


def test_the_first_start_has_no_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INCIDENTS, raising=False)
    assert last_incident() is None
    pass_on(monkeypatch)
    assert last_incident() is None


def test_the_last_incident_is_the_newest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on(monkeypatch, incident(1), incident(2))
    assert last_incident() == incident(2)


def test_a_controller_may_send_more_than_this_version_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = msgspec.to_builtins(incident()) | {"weather": "rain"}
    monkeypatch.setenv(INCIDENTS, msgspec.json.encode([more]).decode())
    assert last_incident() == incident()


@pytest.mark.parametrize("text", ["no", '{"number": 1}', '[{"number": "x"}]'])
def test_an_unreadable_variable_is_refused_by_name(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INCIDENTS, text)
    with pytest.raises(UserError, match=f"{INCIDENTS}: got .*remove {INCIDENTS} from spec.env"):
        last_incident()


def test_a_note_says_what_happened_and_what_it_cost() -> None:
    before = describe(incident())
    assert before == (
        "incident 1 at 2026-09-21 14:13:20 UTC (infrastructure): worker 1 was killed; "
        "restart on the same node; the last step before it was 41"
    )
    after = describe(incident(world_size_after=1), began_after=39, now_s=AT_NS / 1e9 + 3.25)
    assert after.endswith(
        "2 ranks before, 1 now; 3.2 s until the next step was finished; 2 steps trained again"
    )
    assert describe(incident(last_step_at_least=True), 40).endswith(
        "; at least 1 step trained again"
    )
    assert describe(incident(), 41).endswith("; 0 steps trained again")
    assert "trained again" not in describe(incident(last_step=-1), 41), "it is not known"
    assert "(infrastructure, caused with holdfast chaos)" in describe(incident(rehearsal=True))


class Writer:
    """As a SummaryWriter."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.texts = broken, list[tuple[str, str, int]]()

    def add_text(self, tag: str, text: str, step: int) -> None:
        if self.broken:
            raise OSError("no space")
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        pass


def test_notes_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on(monkeypatch, incident(1), incident(2))
    notes, writer = IncidentNotes(39), Writer()
    for step in (41, 42):
        notes.write(step, [writer])
    assert [(tag, text[:10], step) for tag, text, step in writer.texts] == [
        ("holdfast/incidents", "incident 1", 41), ("holdfast/incidents", "incident 2", 41),
    ]  # fmt: skip


def test_a_tracker_that_fails_is_named_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConnectionError("no answer")

    pass_on(monkeypatch, incident())
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=fail))
    IncidentNotes(39).write(41, [Writer(broken=True)])
    errors = capsys.readouterr().err
    assert "the incident is not in MLflow (ConnectionError: no answer)" in errors
    assert "the incident is not in TensorBoard (OSError: no space)" in errors
