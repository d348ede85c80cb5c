"""Buffers of a GPU job: mapped and page-locked in a thread, while the training thread goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import UserError
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.checkpoint.layout import Bytes
from holdfast.workers.session.agent_channel import AgentChannel, AgentGone


def give(agent: socket.socket, number: int) -> None:
    fd = os.memfd_create("buffer")
    os.truncate(fd, 4096)
    worker_transport.send(agent, worker_protocol.Buffer(buffer=number, num_bytes=4096), fd)
    os.close(fd)


class Preparation:
    """Records the thread of each call, and waits until the test allows it to end."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, memory: Bytes) -> None:
        self.threads.append(threading.current_thread().name)
        memory[0] = 1  # it is mapped, and can be written
        self.begun.release()
        assert self.allowed.acquire(timeout=30)


def test_buffers_are_prepared_while_the_training_thread_does_something_else(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    prepare = Preparation()
    link.prepare_with(prepare)
    link.request_buffers(4096)
    for number in range(limits.STAGING_BUFFERS):
        give(agent, number)
    prepare.begun.acquire(timeout=30)  # the training thread has received nothing
    for _ in range(limits.STAGING_BUFFERS):
        prepare.allowed.release()
    taken = [link.take_buffer(0, 1, 0)[0] for _ in range(limits.STAGING_BUFFERS)]
    assert taken == list(range(limits.STAGING_BUFFERS))
    assert set(prepare.threads) == {"holdfast-buffers"}


def test_a_buffer_that_comes_unasked_is_prepared_by_the_thread_too(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    prepare = Preparation()
    prepare.allowed.release()
    prepare.allowed.release()
    link.prepare_with(prepare)
    for number in (0, 1):
        give(agent, number)
        assert link.take_buffer(0, 1, 0)[0] == number
    assert prepare.threads == ["holdfast-buffers"] * 2


def test_a_worker_that_waits_for_a_buffer_long_is_in_phase_save(
    ends: tuple[socket.socket, AgentChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, link = ends
    monkeypatch.setattr("holdfast.workers.session.agent_channel._BUFFER_WAIT_S", 0.0)
    prepare = Preparation()
    link.prepare_with(prepare)
    give(agent, 0)
    taken: list[int] = []
    training = threading.Thread(target=lambda: taken.append(link.take_buffer(0, 1, 0)[0]))
    training.start()
    assert prepare.begun.acquire(timeout=30)
    assert worker_transport.receive(agent)[0] == worker_protocol.BufferWanted()
    assert worker_transport.receive(agent)[0] == worker_protocol.PhaseChanged(phase="save")
    prepare.allowed.release()
    training.join(30)
    assert taken == [0]


def test_an_error_of_the_thread_is_raised_in_the_training_thread(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends

    def fail(memory: Bytes) -> None:
        raise MemoryError("no memory")

    link.prepare_with(fail)
    give(agent, 0)
    with pytest.raises(MemoryError, match="no memory"):
        link.take_buffer(0, 1, 0)


def test_messages_are_handled_once_by_whichever_thread_receives_them(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    link.prepare_with(lambda memory: None)
    link.request_buffers(4096)
    worker_transport.send(agent, worker_protocol.StageAt(step=7, hold=True))
    for number in range(limits.STAGING_BUFFERS):
        give(agent, number)
    assert [link.take_buffer(0, 1, 0)[0] for _ in range(limits.STAGING_BUFFERS)] == [0, 1, 2]
    assert link.stage_requested(7) is True


def test_a_closed_connection_is_reported_by_the_training_thread(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    link.prepare_with(lambda memory: None)
    with contextlib.suppress(AgentGone):
        link.request_buffers(4096)
    agent.close()
    with pytest.raises(AgentGone):
        link.take_buffer(0, 1, 0)


def test_a_refusal_that_the_thread_receives_is_raised_in_the_training_thread(
    ends: tuple[socket.socket, AgentChannel],
) -> None:
    agent, link = ends
    link.prepare_with(lambda memory: None)
    link.request_buffers(4096)
    worker_transport.send(agent, worker_protocol.NoBuffer(detail="host memory: none is free"))
    with pytest.raises(UserError, match="none is free"):
        link.take_buffer(0, 1, 0)
