"""Incidents as a script receives them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.integrations import last_incident
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.environment import INCIDENTS
from holdfast.orchestrator.protocol.facts import LaunchIncident

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
