"""The agent's end of the channel of a test's own process, for callbacks in real trainers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.session import agent_channel, reporting
from holdfast.workers.session.agent_channel import AgentChannel


@dataclass
class AgentEnd:
    link: socket.socket
    channel: AgentChannel
    received: list[Any] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    """The trainer's action, and the phase that the agent knew meanwhile."""

    def read(self) -> None:
        while (message := worker_transport.receive(self.link)[0]) is not None:
            self.received.append(message)

    def sees(self, what: str) -> None:
        self.seen.append((what, self.channel.phase))

    def phases_of(self, what: str) -> set[str]:
        found = {phase for name, phase in self.seen if name == what}
        assert found, f"the trainer did not do: {what}"
        return found

    def messages(self) -> list[Any]:
        """All that was sent until now."""
        last = worker_protocol.Pulse(collectives=len(self.received) + 1_000_000)
        self.channel.send(last)
        deadline = time.monotonic() + 30
        while last not in self.received:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.received

    @property
    def steps(self) -> list[worker_protocol.Reported]:
        return [one for one in self.messages() if isinstance(one, worker_protocol.Reported)]

    @property
    def ticks(self) -> int:
        return sum(isinstance(one, worker_protocol.ProgressTick) for one in self.messages())


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentEnd]:
    ours, theirs = worker_transport.pair()
    channel = AgentChannel(theirs)
    monkeypatch.setattr(agent_channel, "of_process", lambda: channel)
    monkeypatch.setattr(reporting, "_last", reporting._Steps())
    end = AgentEnd(ours, channel)
    reader = threading.Thread(target=end.read)
    reader.start()
    yield end
    theirs.close()
    reader.join()
    ours.close()
