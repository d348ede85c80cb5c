"""An agent's actor without Ray around it: who is told of the agent's end. The agent's process is a
real one that does nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import agent, cluster, rest
from holdfast.orchestrator.backends.ray.agent import WAITERS, AgentActor, AgentOrder
from holdfast.orchestrator.backends.ray.secret_dir import PrivateDirectory

BOUND_S = 30.0
ORDER = AgentOrder(
    job="job", node="node-0", slots=1, job_id="0123456789abcdef", token="token", certificate=b"",
    key=b"", address="127.0.0.1", port=1, env={},
)  # fmt: skip
Scenario = Callable[[AgentActor], Coroutine[Any, Any, None]]
Play = Callable[[Scenario], None]
IDLE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    """Runs a scenario with an actor, as Ray would make it."""
    monkeypatch.setattr(rest, "prepare", lambda: None)
    monkeypatch.setattr(cluster, "log_directory", lambda job, job_id: tmp_path)
    monkeypatch.setattr(AgentActor, "_command", lambda self: IDLE)
    private = lambda job_id: PrivateDirectory(job_id, tmp_path)
    monkeypatch.setattr(agent, "PrivateDirectory", private)

    async def bounded(scenario: Scenario) -> None:
        actor = AgentActor.__new__(AgentActor)
        await actor.__init__(ORDER)  # type: ignore[misc]
        try:
            async with asyncio.timeout(BOUND_S):
                await scenario(actor)
        finally:
            await actor.end()

    return lambda scenario: asyncio.run(bounded(scenario))


def test_calls_of_controllers_that_are_gone_do_not_pile_up_and_the_newest_are_told_of_the_end(
    play: Play,
) -> None:
    async def scenario(actor: AgentActor) -> None:
        calls = [asyncio.ensure_future(actor.wait_for_end()) for _ in range(3 * WAITERS)]
        early, newest = calls[:-WAITERS], calls[-WAITERS:]
        assert await asyncio.gather(*early) == [None] * len(early)
        assert not any(call.done() for call in newest)
        await actor.end()
        assert await asyncio.gather(*newest) == ["was killed by SIGKILL"] * WAITERS
        assert await actor.wait_for_end() == "was killed by SIGKILL"

    play(scenario)


def test_controllers_that_live_at_the_same_time_leave_each_others_calls_alone(
    play: Play,
) -> None:
    async def scenario(actor: AgentActor) -> None:
        both = [asyncio.ensure_future(actor.wait_for_end()) for _ in range(2)]
        await asyncio.sleep(0)
        assert len(actor._waiters) == 2
        assert not any(enough.done() for enough in actor._waiters)
        await actor.end()
        assert await asyncio.gather(*both) == ["was killed by SIGKILL"] * 2

    play(scenario)
