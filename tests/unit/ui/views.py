"""A target with jobs that a test makes up, and the page of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.observe.view import (
    Incident,
    JobView,
    NodeView,
    ProgressPoint,
    WorkerView,
)

TOKEN = "a-token"
HTML = "<img src=x onerror=alert(1)>"


def view(name: str = "llm", num_nodes: int = 2, workers: int = 2, **more: Any) -> JobView:
    """A running job with one incident; its last node has a hung rank."""
    ranks = [
        [WorkerView(rank=node * workers + local, local_rank=local, state="running", phase="train",
                    step=500, memory_bytes=3 * 2**30) for local in range(workers)]
        for node in range(num_nodes)
    ]  # fmt: skip
    ranks[-1][-1].state = "hung"
    ranks[-1][-1].step = 490
    nodes = [
        NodeView(name=f"node-{n}", state="member", heartbeat_age_s=0.4, workers=ranks[n])
        for n in range(num_nodes)
    ]
    seconds = {"detect": 1.0, "stop": 0.5, "place": 0.2, "launch": 1.5, "first-step": 4.0}
    incident = Incident(
        number=1, at_ns=1_100 * 10**9, failure_class="infrastructure",
        title=f"rank 1 raised {HTML}", decision="restart", traceback=f"ValueError: {HTML}",
        seconds=seconds | {"total": 7.2}, generation_before=1, generation_after=2, steps_lost=3,
        world_size_before=4, world_size_after=4, restored_from="memory",
    )  # fmt: skip
    history = [
        ProgressPoint(at_ns=(1_000 + n) * 10**9, step=n * 5, loss=5 / (1 + n), step_s=0.2)
        for n in range(200)
    ]
    given = {
        "state": "running", "job_id": "1", "submitted_ns": 10**12, "now_ns": 1_200 * 10**9,
        "generation": 2, "world_size": num_nodes * workers, "step": 500, "total_steps": 1000,
        "step_s": 0.2, "loss": 2.5, "goodput": 0.9,
        "ledger": {"productive": 180.0, "waiting": 20.0},
        "incidents": [incident], "num_incidents": 1, "nodes": nodes, "history": history,
        "memory_step": 499, "checkpoint_path": "/data", **more,
    }  # fmt: skip
    return JobView(name=name, **given)


class FakeTarget:
    """Jobs by name; counts what is read, and keeps what is requested."""

    def __init__(self, *views: JobView) -> None:
        self.jobs = {one.name: one for one in views}
        self.reads = 0
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.refusal = ""
        self.home = None
        self.missing: dict[str, str] = {}

    def views(self) -> list[JobView]:
        self.reads += 1
        return list(self.jobs.values())

    def find(self, name: str) -> FakeJob:
        if name not in self.jobs:
            raise UserError(f"job {name}: does not exist; `holdfast status` lists those that do")
        return FakeJob(self, name)

    def command(self, *words: str) -> str:
        return " ".join(["holdfast", *words])

    def rejections(self) -> dict[str, str]:
        return self.missing

    def empty_message(self) -> str:
        return "no jobs; start one with `holdfast run FILE`"

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()


class FakeJob:
    def __init__(self, target: FakeTarget, name: str) -> None:
        self._target, self._name = target, name

    def view(self) -> JobView:
        self._target.reads += 1
        if self._target.refusal:
            raise HoldfastError(self._target.refusal)
        return self._target.jobs[self._name]

    def remarks(self, view: JobView) -> list[str]:
        return [] if view.controller_alive else ["No controller is running: `holdfast attach llm`."]

    def request(self, verb: str, **arguments: Any) -> Reply:
        self._target.requests.append((self._name, verb, arguments))
        return Reply(ok=True, detail=f"{verb} is under way")


class Served:
    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.entrance = f"{self.url}/?token={TOKEN}"

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> HTTPResponse:
        """Headers with _ for -. The cookie is sent unless one is given."""
        sent = {"Cookie": f"holdfast-{self.port}={TOKEN}", **headers}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        form = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
        connection.request(method, path, body or None, form | sent)
        return connection.getresponse()

    def text(self, path: str) -> str:
        return self.ask("GET", path).read().decode()


@contextmanager
def served(target: Any) -> Iterator[Served]:
    """The page in a thread of this process."""
    import uvicorn

    from holdfast.orchestrator.ui.app import make_app
    from holdfast.orchestrator.ui.source import Source

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(Source(target, "here"), TOKEN, port), log_level="critical", lifespan="off",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Served(port)
    finally:
        server.should_exit = True
        thread.join(20)


def eventually(condition: Callable[[], Any], bound_s: float = 20.0) -> None:
    give_up = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)
