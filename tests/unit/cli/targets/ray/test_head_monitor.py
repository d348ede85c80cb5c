"""An attached command while the head of its cluster is lost: a listener on this machine is the
head."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.backends.ray import cluster
from holdfast.orchestrator.cli.targets.ray.head_monitor import HeadMonitor, WatchAgain
from tests.unit.hosts.ray.test_host import make_order

BOUND_S = 30.0


class Notes:
    """A display."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.lost = threading.Event()

    def show(self, view: Any) -> None:
        return None

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "does not answer" in text:
            self.lost.set()

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class Head:
    """Listens at one port, or does not."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True)
class CountingWatchAgain(WatchAgain):
    """Records in place of new processes."""

    tries: list[bool]
    """What `possible` returns, in order."""
    replaced: threading.Event = field(default_factory=threading.Event)

    def possible(self) -> bool:
        return self.tries.pop(0)

    def replace_process(self) -> None:
        self.replaced.set()


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    head = Head()
    monkeypatch.setattr(cluster, "head_address", lambda: f"127.0.0.1:{head.port}")
    yield head
    head.stop()


def test_a_command_watches_again_once_a_new_process_finds_the_job(
    head: Head, tmp_path: Path
) -> None:
    display = Notes()
    again = CountingWatchAgain("job", "head:6379", False, tries=[False, False, True])
    with HeadMonitor(display, make_order(tmp_path), again, period_s=0.01):
        head.stop()
        assert display.lost.wait(BOUND_S)
        head.start()
        assert again.replaced.wait(BOUND_S)
    assert again.tries == []
    assert display.notes[-1].endswith("answers again; watching the job again")


def test_the_command_that_watches_again_has_the_job_and_the_address() -> None:
    again = WatchAgain("tiny", "head:6379", as_json=True)
    assert again.command == "holdfast run --attach tiny --ray head:6379"


def test_a_job_that_is_not_found_yet_is_no_reason_to_replace_the_process() -> None:
    assert not WatchAgain("tiny", "127.0.0.1:1", as_json=False).possible()
