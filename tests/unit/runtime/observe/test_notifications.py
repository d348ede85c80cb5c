"""Messages of spec.notify, to real servers that are slow, fail, close and redirect."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.notify import Notify
from holdfast.orchestrator.errors import SpecError
from holdfast.orchestrator.runtime.observe.notifications import (
    JobMessage,
    Notifications,
    NotifyTiming,
    post,
)
from tests.unit.runtime.harness import make_job

SECRET = "xoxb-1234"
SERVERS = [{"url": f"https://hooks.example/{SECRET}"}]
TIMING = NotifyTiming(waiting_s=0.05, request_s=0.3, pauses_s=(0.01, 0.01), end_s=5.0)


class Hook(ThreadingHTTPServer):
    """A server of messages. `how`: what it does with each request, the last one for all others."""

    daemon_threads = True

    def __init__(self, *how: int | str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.how, self.got, self.paths = list(how or (200,)), list[Any](), list[str]()

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/services/{SECRET}"

    def what(self) -> list[str]:
        return [one["happening"] for one in self.got]


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        how = self.server.how.pop(0) if len(self.server.how) > 1 else self.server.how[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if how == "slow":
            time.sleep(1.0)
            return
        if how == "close":
            self.close_connection = True
            return
        if isinstance(how, str):
            self.send_response(302)
            self.send_header("Location", how)
        else:
            self.send_response(how)
            self.server.got += [body] if how == 200 else []
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hook(*how: int | str) -> Iterator[Hook]:
    server = Hook(*how)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def wanted(url: str, **more: Any) -> Notify:
    return Notify(url=url, **{"format": "json", **more})


def message(happening: Any = "recovered", **more: Any) -> JobMessage:
    given = {"cause": "hang", "reason": "rank 1 <stopped> & hung", "step": 7, **more}
    return JobMessage("llm", happening, **given)


def sent(url: str, *messages: JobMessage, timing: NotifyTiming = TIMING) -> tuple[list[str], float]:
    """Send them and end the job. Returns the notes, and how long `send` took."""
    notes: list[str] = []

    async def send() -> float:
        some = Notifications("llm", [(wanted(url), url)], notes.append, timing=timing)
        began_s = time.monotonic()
        for one in messages:
            some._send(one)
        took_s = time.monotonic() - began_s
        await some.close(ended=True)
        return took_s

    return notes, asyncio.run(send())


@pytest.mark.parametrize(
    ("how", "problem", "requests"),
    [
        ((500, 500, 200), "", 3),
        (("close", 200), "", 2),
        (("slow", 200), "", 2),
        ((429, 200), "", 2),
        ((500,), "the server answers 500 (3 attempts)", 3),
        (("slow",), "no answer (TimeoutError) (3 attempts)", 3),
        (("close",), "no answer (RemoteDisconnected) (3 attempts)", 3),
        ((404,), "the server answers 404", 1),
    ],
)
def test_a_message_is_tried_again_where_that_may_help(
    how: tuple[int | str, ...], problem: str, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hook(*how) as server:
        notes, took_s = sent(server.url(), message())
        assert server.paths == [f"/services/{SECRET}"] * requests
        assert bool(server.got) == (not problem)
    assert took_s < TIMING.request_s, "no caller waits for the server"
    assert notes == ([f"spec.notify[0]: a message was not sent: {problem}"] if problem else [])
    assert SECRET not in caplog.text


def test_a_redirect_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    with hook() as elsewhere, hook(elsewhere.url("localhost")) as server:
        notes, _ = sent(server.url(), message())
        assert (len(server.paths), elsewhere.paths) == (1, [])
    assert "302, a redirect, which is not followed" in notes[0]
    assert SECRET not in caplog.text + notes[0]


def test_a_problem_never_shows_the_address() -> None:
    for url in (f"http://no-such-host.invalid/{SECRET}", f"http://127.0.0.1:1/{SECRET}",
                f"http://127.0.0.1/{SECRET} x", f"http://[{SECRET}"):  # fmt: skip
        problem, _ = post(url, b"{}", 5.0)
        assert problem and SECRET not in problem and "no-such-host" not in problem
    with pytest.raises(SpecError) as error:
        make_job(notify=[{"url": f"ftp://x/{SECRET}"}])
    assert "spec.notify.0.url" in str(error.value) and SECRET not in str(error.value)


def test_one_message_of_a_cause_is_sent_in_a_minute() -> None:
    with hook() as server:
        sent(server.url(), *[message()] * 3, message(cause="user"), message("failed"))
        assert [(one["happening"], one["cause"]) for one in server.got] == [
            ("recovered", "hang"), ("recovered", "user"), ("failed", "hang"),
        ]  # fmt: skip


async def test_the_next_message_of_a_cause_counts_those_that_were_not_sent() -> None:
    with hook() as server:
        servers = [(wanted(server.url()), server.url())]
        timing = NotifyTiming(same_cause_s=0.05)
        some = Notifications("llm", servers, print, timing=timing)
        some._send(message())
        some._send(message())
        await asyncio.sleep(0.1)
        some._send(message())
        await some.close(ended=True)
        assert [one["more"] for one in server.got] == [0, 1]


async def test_a_server_for_lost_steps_is_not_limited_by_recoveries_that_lose_none() -> None:
    with hook() as server:
        servers = [(wanted(server.url(), when=["lost-steps"]), server.url())]
        some = Notifications("llm", servers, lambda _: None, timing=TIMING)
        some._send(message(steps_lost=0))
        some._send(message(steps_lost=500), message("lost-steps", steps_lost=500))
        await some.close(ended=True)
        assert [one["steps_lost"] for one in server.got] == [500]


def test_an_end_that_cannot_wait_for_a_message_says_that_it_was_not_sent() -> None:
    timing = NotifyTiming(request_s=5.0, pauses_s=(60.0,), end_s=0.2)
    with hook(500) as server:
        notes, _ = sent(server.url(), message(), timing=timing)
    assert notes == [
        "spec.notify[0]: a message was not sent: the job ended, and no answer came within 0.2 s"
    ]


def test_slack_gets_text_in_which_a_jobs_texts_stay_texts() -> None:
    one = message(seconds=12.34, steps_lost=3, command="holdfast status llm --report", more=2)
    assert json.loads(one.body("slack")) == {
        "text": "*llm* recovered after 12.3 s: rank 1 &lt;stopped&gt; &amp; hung\n"
        "after 8 steps, 3 steps lost, 2 more of this cause\n`holdfast status llm --report`"
    }
    assert json.loads(one.body("json"))["steps_lost"] == 3
