"""The progress protocol of Kubeflow Trainer, as frameworks speak it: real requests on loopback."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.protocol.environment import PROGRESS_TOKEN, PROGRESS_URL
from holdfast.workers.agent.process.progress_server import (
    MAX_BODY_BYTES,
    ProgressServer,
    Seat,
    parse,
    without_proxy,
)
from holdfast.workers.worker_protocol import Reported


class Agent:
    def __init__(self) -> None:
        self.reports: list[tuple[Seat, Reported]] = []
        self.notes: list[str] = []
        self.server = ProgressServer(
            lambda seat, report: self.reports.append((seat, report)), self.notes.append
        )

    def post(self, environment: dict[str, str], body: Any, token: str = "") -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = token or Path(environment[PROGRESS_TOKEN]).read_text(encoding="ascii")
        request = urllib.request.Request(
            environment[PROGRESS_URL], data, {"Authorization": f"Bearer {token}"}
        )
        try:
            # As a new process: urlopen keeps the proxies of its first call.
            with urllib.request.build_opener().open(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def _status(**metrics: object) -> dict[str, Any]:
    named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return {"trainerStatus": {"lastUpdatedTime": "2026-11-25T00:00:00Z", "metrics": named}}


def _percent(percent: int, **metrics: object) -> dict[str, Any]:
    """A post of Kubeflow's SDK."""
    post = _status(**metrics)
    post["trainerStatus"]["progressPercentage"] = percent
    return post


def test_a_post_reaches_the_agent_with_the_rank_of_its_token() -> None:
    agent = Agent()
    seats = {rank: agent.server.environment(3, rank) for rank in (0, 1)}
    assert agent.post(seats[1], _status(current_step=60, total_steps=400, loss=0.25)) == 200
    assert agent.post(seats[0], _status(total_steps=400)) == 200
    expected = Reported(step=59, total_steps=400, loss=0.25, source="posted")
    assert agent.reports == [
        ((3, 1), expected),
        ((3, 0), Reported(step=-1, total_steps=400, source="posted")),
    ]


def test_a_token_of_an_earlier_generation_and_a_wrong_one_are_refused() -> None:
    agent = Agent()
    old = agent.server.environment(1, 0)
    token = Path(old[PROGRESS_TOKEN]).read_text(encoding="ascii")
    agent.server.environment(2, 0)
    assert agent.post(old, _status(current_step=1), token=token) == 401
    assert agent.post(old, _status(current_step=1), token="guessed") == 401
    assert agent.post(old, _status(current_step=1)) == 200, "the file has the new one"
    assert [seat for seat, _report in agent.reports] == [(2, 0)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[", 400),
        (b"{}", 400),
        (_status(current_step="many"), 400),
        (_status(current_step=-3), 400),
        (_status(current_step=1.5), 400),
        (_status(current_step="nan"), 400),
        (_status(total_steps="inf"), 400),
        (_status(step=5), 400),
        (_status(loss=0.5), 400),
        ({"trainerStatus": {"progressPercentage": 40, "estimatedRemainingSeconds": 9}}, 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_a_body_that_is_no_report_is_refused(body: Any, status: int) -> None:
    agent = Agent()
    assert agent.post(agent.server.environment(1, 0), body) == status
    assert agent.reports == []


def test_the_end_and_a_loss_that_is_no_number() -> None:
    end = parse(json.dumps({"trainerStatus": {"progressPercentage": 100, "metrics": []}}).encode())
    assert end is not None and end.finished
    step = parse(json.dumps(_status(current_step=2, loss="nan")).encode())
    assert step is not None and (step.step, step.loss) == (1, None)


def test_posts_of_kubeflows_sdk_are_accepted_and_that_they_have_no_step_is_noted_once() -> None:
    agent = Agent()
    environment = agent.server.environment(1, 0)
    for post in (_percent(0), _percent(50, loss=0.5, accuracy=0.9), _percent(75)):
        assert agent.post(environment, post) == 200
    assert agent.reports == [] and len(agent.notes) == 1
    assert "current_step" in agent.notes[0]
    assert agent.post(environment, _percent(100)) == 200
    assert [report.finished for _seat, report in agent.reports] == [True]


PROXY_NAMES = ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "no_proxy", "NO_PROXY")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_post_does_not_go_to_a_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent()
    environment = agent.server.environment(1, 0) | {name: "http://127.0.0.1:9", "NO_PROXY": "a.b"}
    for key in PROXY_NAMES:
        monkeypatch.delenv(key, raising=False)
    if name != "ALL_PROXY":  # which urllib does not read
        monkeypatch.setenv(name, environment[name])
        with pytest.raises(urllib.error.URLError, match="refused"):
            agent.post(environment, _status(current_step=1))
    environment |= without_proxy(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "a.b,127.0.0.1"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert agent.post(environment, _status(current_step=1)) == 200
    assert without_proxy({"NO_PROXY": "a.b", "http_proxy": ""}) == {}
