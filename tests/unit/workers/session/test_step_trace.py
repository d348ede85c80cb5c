"""A trace of a worker's steps: it begins and ends where a step ends, and whatever happens training
goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.workers import packets, worker_protocol, worker_transport
from holdfast.workers.session import step_trace
from holdfast.workers.session.agent_channel import AgentChannel

WAIT_S = 30.0


class Agent:
    """The agent's ends of a worker's sockets."""

    def __init__(self, place: Path) -> None:
        self.link, self._worker_end = worker_transport.pair()
        self.asks, asked = worker_transport.pair()
        self.link.settimeout(WAIT_S)
        self.channel = AgentChannel(self._worker_end, inspection_socket=asked)
        self.file = place / "trace.json"
        self.step = 0

    def ask(self, **changes: object) -> None:
        wanted = worker_protocol.TraceWanted(
            file=str(self.file), seconds=60, steps=2, max_bytes=2**30, wait_s=WAIT_S
        )
        wanted = msgspec.structs.replace(wanted, **changes)
        packets.send(self.asks, msgspec.msgpack.encode(wanted))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.ones(8, 8) @ torch.ones(8, 8)
            self.channel.step_ended(self.step)
            self.step += 1

    def wanted(self) -> None:
        """Returns when the pulse thread has taken the request."""
        while self.channel.trace is None:
            pass

    def answer(self) -> worker_protocol.TraceWritten:
        while True:
            message, _fd = worker_transport.receive(self.link)
            if isinstance(message, worker_protocol.TraceWritten):
                return message


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    made.channel.has_steps = True
    made.channel.start_pulse()
    yield made
    made.channel.stop_pulse()


def steps_in(file: Path) -> list[str]:
    events = json.loads(file.read_text())["traceEvents"]
    return sorted(one["name"] for one in events if one["name"].startswith("step "))


def test_whole_steps_are_recorded_once_they_are_asked_for(agent: Agent) -> None:
    agent.train(5)
    agent.ask()
    agent.wanted()
    agent.train(4)
    answer = agent.answer()
    assert answer.problem == "" and answer.detail.startswith("steps 7 to 8, ")
    assert steps_in(agent.file) == ["step 7", "step 8"]
    assert agent.channel.trace is None and agent.channel.phase == "start"
    agent.ask(steps=1)
    agent.wanted()
    agent.train(3)
    assert agent.answer().detail.startswith("step 11, ")


def test_a_recording_ends_after_its_seconds(agent: Agent) -> None:
    agent.ask(seconds=0, steps=0)
    agent.wanted()
    agent.train(3)
    assert agent.answer().detail.startswith("step 2, ")


def test_a_recording_ends_before_it_is_too_large(agent: Agent) -> None:
    """By the size of the step that is recorded first."""
    agent.ask(steps=100, max_bytes=1)
    agent.wanted()
    agent.train(4)
    detail = agent.answer().detail
    assert detail.startswith("step 2, ") and "ended early" in detail


def test_a_worker_that_reports_no_steps_says_what_to_write(agent: Agent) -> None:
    agent.channel.has_steps = False
    agent.ask()
    assert "session.report(step)" in agent.answer().problem


def test_no_recording_begins_beside_a_profiler_of_the_script(agent: Agent) -> None:
    own = torch.profiler.schedule(wait=1, warmup=2, active=2)
    with torch.profiler.profile(schedule=own) as theirs:
        for _ in range(3):  # it waits, it warms up, it records
            theirs.step()
            agent.ask(steps=1)
            agent.wanted()
            agent.train(1)
            assert "a profiler of its own" in agent.answer().problem
    assert agent.channel.trace is None


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_recording_ends_before_a_profiler_of_the_script_begins(
    agent: Agent, tmp_path: Path, steps: int
) -> None:
    agent.ask(steps=9)
    agent.wanted()
    agent.train(1 + steps)
    with torch.profiler.profile() as theirs:
        agent.train(2)
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    assert "aten::matmul" in (tmp_path / "theirs.json").read_text()
    answer = agent.answer()
    if steps == 3:
        assert answer.detail.startswith("steps 2 to 3, ")
        assert "a profiler of its own" in answer.detail
        assert steps_in(agent.file)[:2] == ["step 2", "step 3"]
    else:
        assert "a profiler of its own" in answer.problem
    assert agent.channel.trace is None
    agent.ask(steps=1)
    agent.wanted()
    agent.train(3)
    assert not agent.answer().problem, "and later another one begins"


def test_a_profiler_in_another_thread_takes_the_place_of_a_recording(agent: Agent) -> None:
    def profiles() -> None:
        with torch.profiler.profile():
            torch.ones(1) + 1

    agent.ask(steps=9)
    agent.wanted()
    agent.train(2)
    other = threading.Thread(target=profiles)
    other.start()
    other.join()
    assert "a profiler of its own" in agent.answer().problem
    agent.train(3)
    assert agent.channel.trace is None


def test_a_request_beside_a_recording_is_refused(agent: Agent) -> None:
    agent.ask(steps=2)
    agent.wanted()
    agent.train(1)
    agent.ask(steps=1)
    assert "under way" in agent.answer().problem
    agent.train(3)
    assert agent.answer().detail.startswith("steps 2 to 3, ")


def test_a_request_that_the_agent_has_given_up_is_forgotten(agent: Agent) -> None:
    agent.ask(wait_s=-1)
    agent.wanted()
    agent.train(1)
    assert agent.channel.trace is None


def test_a_file_that_cannot_be_written_is_reported_and_training_goes_on(agent: Agent) -> None:
    agent.ask(file=str(agent.file / "no" / "directory"), steps=1)
    agent.wanted()
    agent.train(3)
    assert "No such file or directory" in agent.answer().problem


def test_a_file_that_was_written_in_part_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": [')
    with pytest.raises(OSError, match="not whole"):
        step_trace._expect_whole(file)


def test_a_profiler_that_cannot_start_is_reported_and_training_goes_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(torch.profiler.profile, "start", refuses)
    agent.ask()
    agent.wanted()
    agent.train(3)
    assert "another profiler runs" in agent.answer().problem
    assert agent.channel.phase == "start"


def test_a_question_and_a_request_on_the_second_socket_differ() -> None:
    wanted = worker_protocol.TraceWanted(file="", seconds=1, steps=1, max_bytes=1, wait_s=1)
    assert msgspec.msgpack.encode(wanted)[:1] != worker_protocol.ASK_STACK
