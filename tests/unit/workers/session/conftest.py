"""The wire between a session and its agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from holdfast.workers import worker_transport
from holdfast.workers.session.agent_channel import AgentChannel


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, AgentChannel]]:
    """The agent's end and the worker's."""
    ours, theirs = worker_transport.pair()
    with ours, theirs:
        yield ours, AgentChannel(theirs, hold_s=0.2)
