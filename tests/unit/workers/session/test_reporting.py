"""session.report and session.phase, for scripts that keep their own checkpoints."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from holdfast import session
from holdfast.orchestrator.errors import UserError
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.session import agent_channel, reporting
from holdfast.workers.session.agent_channel import AgentChannel


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The agent's end of this process's channel."""
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        channel = AgentChannel(theirs)
        monkeypatch.setattr(agent_channel, "of_process", lambda: channel)
        monkeypatch.setattr(reporting, "_last", reporting._Steps())
        yield ours


def _received(link: socket.socket) -> object:
    message, _fd = worker_transport.receive(link)
    return message


def test_each_report_reaches_the_agent_with_the_time_of_its_step(agent: socket.socket) -> None:
    session.report(60, loss=torch.tensor(0.5), tokens=128, flops=2.0, total_steps=100)
    session.report(62, loss=0.25)
    first, second = _received(agent), _received(agent)
    assert first == worker_protocol.Reported(
        step=60, loss=0.5, tokens=128, flops_per_step=2.0, total_steps=100
    )
    assert isinstance(second, worker_protocol.Reported)
    assert (second.step, second.loss) == (62, 0.25) and second.step_s > 0


def test_a_framework_says_after_which_step_it_begins(agent: socket.socket) -> None:
    reporting.begin(49)
    began = worker_protocol.PhaseChanged(phase="build", began_after=49)
    assert _received(agent) == began
    session.report(59)
    first = _received(agent)
    assert isinstance(first, worker_protocol.Reported)
    assert first.step == 59 and first.step_s > 0


def test_a_step_that_does_not_grow_is_refused(agent: socket.socket) -> None:
    session.report(7)
    with pytest.raises(UserError, match="got step 7 after 7; expected a larger one"):
        session.report(7)


def test_a_phase_ends_also_when_it_fails(agent: socket.socket) -> None:
    session.report(0)
    with pytest.raises(ZeroDivisionError), session.phase("evaluate"):
        _ = 1 / 0
    phases = [_received(agent) for _ in range(3)][1:]
    assert phases == [
        worker_protocol.PhaseChanged(phase="evaluate"),
        worker_protocol.PhaseChanged(phase="train"),
    ]
    names = "expected one of build, compile, train, evaluate, save"
    with pytest.raises(UserError, match=names), session.phase("eval"):  # type: ignore[arg-type]
        pass


def test_outside_holdfast_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_last", reporting._Steps())
    session.report(0, loss=torch.tensor(1.0))
    with session.phase("save"):
        pass
    assert session.preemption() is None


def test_the_first_question_asks_for_the_notice_and_later_ones_see_it(agent: socket.socket) -> None:
    assert session.preemption() is None
    assert _received(agent) == worker_protocol.StopNoticeWanted()
    worker_transport.send(agent, worker_protocol.StopNotice(after_step=12, grace_s=25.0))
    notice = session.preemption()
    assert notice is not None and notice.after_step == 12 and 0 < notice.seconds <= 25.0
    assert session.preemption() is not None, "until the process ends"


def test_progress_in_a_phase_is_sent_once_a_second(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock[0])
    for clock[0] in (100.0, 100.4, 100.9, 101.0, 101.5, 102.0):
        reporting.progress("evaluate")
    reporting.progress("finish")
    assert [_received(agent) for _ in range(4)] == [
        worker_protocol.PhaseChanged(phase="evaluate"),
        worker_protocol.ProgressTick(),
        worker_protocol.ProgressTick(),
        worker_protocol.PhaseChanged(phase="finish"),
    ]
