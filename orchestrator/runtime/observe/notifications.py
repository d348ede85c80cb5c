"""Messages about a job to the servers of spec.notify: what happened, what it cost, and a command to
go on with.

Nothing waits for a server but the end of a job, and that for seconds. A controller that takes over
sends nothing about what was over before.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.notify import Happening, Notify
from holdfast.orchestrator.core.state import IncidentRecord, JobState
from holdfast.orchestrator.protocol.facts import steps_done

from .view import JobView

FAILURES = ("user", "infrastructure", "preemption", "hang")
MAX_QUEUED = 20
"""Messages that one server may still get; older ones are dropped."""
THREADS = 4

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class NotifyTiming:
    same_cause_s: float = 60.0
    """A second message of one cause within this time is only counted."""
    waiting_s: float = 60.0
    """A shorter wait for nodes is not worth a message."""
    request_s: float = 10.0
    pauses_s: tuple[float, ...] = (1.0, 5.0, 25.0, 120.0)
    """Seconds between two attempts."""
    end_s: float = 8.0
    """Seconds that the end of the job waits for its last messages."""


@dataclass(frozen=True)
class JobMessage:
    job: str
    happening: Happening
    cause: str
    """Failure class; empty: none."""
    reason: str
    step: int
    seconds: float | None = None
    """Duration of the recovery, or of the job."""
    steps_lost: int | None = None
    command: str = ""
    more: int = 0
    """Messages of this cause that were not sent since the last one."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """The same in each attempt: a slow server may get a message twice."""

    def body(self, form: str) -> bytes:
        if form == "json":
            return json.dumps(self.__dict__).encode()
        return json.dumps({"text": self._text()}).encode()

    def _text(self) -> str:
        """The message in Slack's markup. Texts of a job stay texts."""
        verb = {"lost-steps": "lost steps", "waiting": "waits"}.get(self.happening, self.happening)
        after = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        text = f"*{self.job}* {verb}{after}: {self.reason}"
        for char, escape in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(char, escape)
        facts = [f"after {steps_done(self.step)}"] if self.step >= 0 else []
        facts += [] if self.steps_lost is None else [f"{self.steps_lost} steps lost"]
        facts += [f"{self.more} more of this cause"] if self.more else []
        return "\n".join(filter(None, (text, ", ".join(facts), f"`{self.command}`")))


class Notifications:
    """Notifications of one job."""

    def __init__(
        self,
        job: str,
        servers: Sequence[tuple[Notify, str]],
        note: Callable[[str], None],
        options: str = "",
        timing: NotifyTiming | None = None,
    ) -> None:
        """`servers`: each with its address. `options`: what a command needs to find the job."""
        self._job, self._options, self._timing = job, options, timing or NotifyTiming()
        self._servers = [
            _Server(f"spec.notify[{number}]", setting, url, note, self._timing)
            for number, (setting, url) in enumerate(servers)
            if url
        ]
        self._through = 0
        """Number of the last incident that is over."""
        self._phase = ""
        self._waiting: asyncio.TimerHandle | None = None

    def begin(self, state: JobState) -> None:
        """A controller starts with this state."""
        over = [incident.number for incident in state.incidents if _is_over(incident, state)]
        self._through, self._phase = max(over, default=0), state.phase

    def observe(self, state: JobState, view: Callable[[], JobView]) -> None:
        """Send what has happened. `view` is called only if something has."""
        for record in state.incidents:
            if record.number > self._through and _is_over(record, state):
                self._through = record.number
                if record.failure_class in FAILURES and record.number == state.num_incidents:
                    self._recovered(view())
        if state.phase == self._phase:
            return
        self._phase = state.phase
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if state.phase in ("failed", "succeeded"):
            self._ended(view())
        elif state.phase == "pending":
            loop = asyncio.get_running_loop()
            self._waiting = loop.call_later(
                self._timing.waiting_s, lambda: self._waits(view(), "status")
            )
        elif state.phase == "suspended" and state.hold is not None:
            self._waits(view(), "resume")

    async def close(self, *, ended: bool) -> None:
        """Drop what is not sent yet; of a job that has ended, wait a little for it."""
        if self._waiting is not None:
            self._waiting.cancel()
        tasks = [target.task for target in self._servers if target.task is not None]
        if tasks and ended:
            await asyncio.wait(tasks, timeout=self._timing.end_s)
        for server in self._servers:
            server.close(ended=ended)

    def _recovered(self, view: JobView) -> None:
        incident = view.incidents[-1]
        message = self._message(
            view, "recovered", incident.failure_class, incident.title, "status", "--report"
        )
        message = replace(
            message,
            seconds=incident.seconds.get("total", sum(incident.seconds.values())),
            steps_lost=incident.steps_lost,
        )
        lost = replace(message, happening="lost-steps") if incident.steps_lost else None
        self._send(message, lost)

    def _ended(self, view: JobView) -> None:
        failed = view.state == "failed"
        cause = view.incidents[-1].failure_class if failed and view.incidents else ""
        happening: Happening = "failed" if failed else "finished"
        reason = view.reason or "all steps are trained"
        message = self._message(view, happening, cause, reason, "status", "--report")
        end_ns = view.finished_ns or view.now_ns
        lost = view.steps_lost if view.num_incidents else None
        seconds = (end_ns - view.submitted_ns) / 1e9
        self._send(replace(message, seconds=seconds, steps_lost=lost))

    def _waits(self, view: JobView, verb: str) -> None:
        self._send(self._message(view, "waiting", "", view.hold or view.reason, verb))

    def _message(
        self, view: JobView, happening: Happening, cause: str, reason: str, verb: str, *more: str
    ) -> JobMessage:
        words = ["holdfast", verb, self._job.rpartition("/")[2], *more, self._options]
        command = " ".join(filter(None, words))
        return JobMessage(self._job, happening, cause, reason, view.step, command=command)

    def _send(self, message: JobMessage, instead: JobMessage | None = None) -> None:
        """`instead`: for servers that want no message of this kind."""
        for server in self._servers:
            for text in filter(None, (message, instead)):
                if text.happening in server.wanted.when:
                    server.send(text)
                    break


class _Server:
    """One destination: messages in order, each until the server accepts or rejects it."""

    def __init__(
        self,
        field: str,
        wanted: Notify,
        url: str,
        note: Callable[[str], None],
        timing: NotifyTiming,
    ) -> None:
        self.wanted = wanted
        self.task: asyncio.Task[None] | None = None
        self._field, self._url, self._note, self._timing = field, url, note, timing
        self._queue: deque[JobMessage] = deque(maxlen=MAX_QUEUED)
        self._problem = ""
        self._sent_s: dict[tuple[str, str], float] = {}
        self._more: dict[tuple[str, str], int] = {}

    def send(self, message: JobMessage) -> None:
        key, now_s = (message.happening, message.cause), asyncio.get_running_loop().time()
        if now_s - self._sent_s.get(key, -1e9) < self._timing.same_cause_s:
            self._more[key] = self._more.get(key, 0) + 1
            return
        self._sent_s[key] = now_s
        self._queue.append(replace(message, more=self._more.pop(key, 0)))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._deliver())

    def close(self, *, ended: bool) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()
            if ended:
                self._report(f"the job ended, and no answer came within {self._timing.end_s:g} s")

    async def _deliver(self) -> None:
        while self._queue:
            problem = await self._attempts(self._queue.popleft().body(self.wanted.format))
            if problem and problem != self._problem:
                self._report(problem)
            self._problem = problem

    def _report(self, problem: str) -> None:
        log.warning("%s: a message was not sent: %s", self._field, problem)
        self._note(f"{self._field}: a message was not sent: {problem}")

    async def _attempts(self, body: bytes) -> str:
        """Reason why the message was not sent; empty: it was."""
        loop = asyncio.get_running_loop()
        for pause_s in (*self._timing.pauses_s, None):
            problem, again = await loop.run_in_executor(
                _threads(), post, self._url, body, self._timing.request_s
            )
            if not problem or not again:
                return problem
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return f"{problem} ({len(self._timing.pauses_s) + 1} attempts)"


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads of their own: a slow server must not delay what else uses threads."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="notify")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message goes where the user said, or nowhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(url: str, body: bytes, timeout_s: float) -> tuple[str, bool]:
    """Reason why the server did not accept the message (empty: it did), without its address, and
    whether another attempt may help."""
    try:
        request = urllib.request.Request(
            url, body, {"Content-Type": "application/json", "User-Agent": "holdfast"}
        )
        urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s).close()
        return "", False
    except HTTPError as error:
        error.close()
        moved = ", a redirect, which is not followed" if 300 <= error.code < 400 else ""
        return f"the server answers {error.code}{moved}", error.code >= 500 or error.code == 429
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = getattr(reason, "strerror", None) if type(reason).__module__ != "ssl" else None
        return f"no answer ({text or type(reason).__name__})", not isinstance(error, ValueError)


def _is_over(record: IncidentRecord, state: JobState) -> bool:
    """True if the last step is known, another incident began, or a silent script runs again."""
    silent = not record.shows_progress and record.started_ns is not None
    ended = record.first_step_ns is not None or (silent and state.phase == "running")
    return ended or record.number < state.num_incidents


def for_job(
    job: TrainingJob,
    note: Callable[[str], None],
    options: str = "",
    addresses: Sequence[str] | None = None,
) -> Notifications | None:
    """`addresses` of its servers, empty for one that gets nothing. Default: the spec's."""
    if not job.spec.notify:
        return None
    for number, setting in enumerate(job.spec.notify):
        if addresses is None and setting.url is None:
            note(f"spec.notify[{number}].secret: works on Kubernetes only, so nothing is sent")
    urls = addresses or [entry.url or "" for entry in job.spec.notify]
    name = f"{job.metadata.namespace}/{job.name}" if addresses is not None else job.name
    return Notifications(name, list(zip(job.spec.notify, urls, strict=True)), note, options)
