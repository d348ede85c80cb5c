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
)
from holdfast.workers.worker_protocol import Reported


class Agent:
    def __init__(self) -> None:
        self.reports: list[tuple[Seat, Reported]] = []
        self.server = ProgressServer(lambda seat, report: self.reports.append((seat, report)))

    def post(self, environment: dict[str, str], body: Any, token: str = "") -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = token or Path(environment[PROGRESS_TOKEN]).read_text(encoding="ascii")
        request = urllib.request.Request(
            environment[PROGRESS_URL], data, {"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def _status(**metrics: object) -> dict[str, Any]:
    named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return {"trainerStatus": {"lastUpdatedTime": "2026-11-25T00:00:00Z", "metrics": named}}


def test_a_post_reaches_the_agent_with_the_rank_of_its_token() -> None:
    agent = Agent()
    seats = {rank: agent.server.environment(3, rank) for rank in (0, 1)}
    assert agent.post(seats[1], _status(current_step=60, total_steps=400, loss=0.25)) == 200
    assert agent.post(seats[0], _status(total_steps=400)) == 200
    expected = Reported(step=59, total_steps=400, loss=0.25, posted=True)
    assert agent.reports == [
        ((3, 1), expected),
        ((3, 0), Reported(step=-1, total_steps=400, posted=True)),
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
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_a_body_that_is_no_report_is_refused(body: Any, status: int) -> None:
    agent = Agent()
    assert agent.post(agent.server.environment(1, 0), body) == status
    assert agent.reports == []


def test_the_end_and_a_loss_that_is_no_number() -> None:
    done = {"trainerStatus": {"progressPercentage": 100, "metrics": []}}
    assert parse(json.dumps(done).encode()).finished
    assert parse(json.dumps(_status(current_step=2, loss="nan")).encode()).loss is None
