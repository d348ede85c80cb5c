"""Serves the progress protocol of Kubeflow Trainer on loopback: programs post how far they are.

transformers posts by itself where the two variables below are set; any program can:

    curl --data '{"trainerStatus": {"metrics": [{"name": "current_step", "value": "7"}]}}' \\
        --header "Authorization: Bearer $(cat $KUBEFLOW_TRAINER_SERVER_TOKEN)" \\
        $KUBEFLOW_TRAINER_SERVER_URL

Steps are counted as the protocol counts them, from 1: `current_step` steps are finished. The SDK of
Kubeflow posts a percentage alone, which is accepted and reported as saying no step.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
from collections.abc import Callable, Mapping

import msgspec

from holdfast.orchestrator.protocol.environment import PROGRESS_TOKEN, PROGRESS_URL
from holdfast.orchestrator.protocol.strangers import GuardedHttpServer, GuardedRequest
from holdfast.workers.worker_protocol import Reported

MAX_BODY_BYTES = 64 * 2**10

HOST = "127.0.0.1"
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
STEPS = (
    "expected the metric current_step (finished steps), total_steps, or a progressPercentage of 100"
)

Seat = tuple[int, int]
"""(generation, rank)."""


class Metric(msgspec.Struct):
    name: str
    value: str | float = ""


class TrainerStatus(msgspec.Struct, rename="camel"):
    progress_percentage: int | None = None
    last_updated_time: str = ""
    """transformers and the SDK of Kubeflow send it always, people who post rarely."""
    metrics: list[Metric] = []


class Post(msgspec.Struct, rename="camel"):
    trainer_status: TrainerStatus


class ProgressServer:
    """One per agent. `on_report`, and `on_note` with a sentence for the job's events, are called in
    a thread of the server."""

    def __init__(
        self, on_report: Callable[[Seat, Reported], None], on_note: Callable[[str], None]
    ) -> None:
        """Raises OSError if loopback has no free port."""
        self._on_report, self._on_note = on_report, on_note
        self._noted = False
        self._tokens: dict[int, tuple[Seat, str]] = {}
        """Rank -> its seat in the newest generation, and its token."""
        self._files: dict[int, int] = {}
        """Rank -> descriptor of the file that holds its token."""
        server = GuardedHttpServer((HOST, 0), self._handler())
        server.serve_in_thread("holdfast-progress")
        self._url = f"http://{HOST}:{server.port}/"

    def environment(self, generation: int, rank: int) -> dict[str, str]:
        """The variables with which a worker finds the server. The token is in memory: other users
        of the machine cannot read it, and nothing is left behind."""
        token = secrets.token_urlsafe(32)
        if rank not in self._files:
            self._files[rank] = os.memfd_create(f"holdfast-progress-{rank}", os.MFD_CLOEXEC)
        fd = self._files[rank]
        os.ftruncate(fd, 0)
        os.pwrite(fd, token.encode(), 0)
        self._tokens[rank] = ((generation, rank), token)
        return {PROGRESS_URL: self._url, PROGRESS_TOKEN: f"/proc/{os.getpid()}/fd/{fd}"}

    def _seat(self, authorization: str) -> Seat | None:
        token_given = authorization.removeprefix("Bearer ").strip().encode()
        authorized = None
        for seat, token in list(self._tokens.values()):
            if hmac.compare_digest(token_given, token.encode()):
                authorized = seat
        return authorized

    def _note(self) -> None:
        """Log once: such posts come every few seconds."""
        if not self._noted:
            self._noted = True
            self._on_note(
                f"the script posts its progress without steps, so none are shown: {STEPS}"
            )

    def _handler(self) -> type[GuardedRequest]:
        server = self

        class Handler(GuardedRequest):
            def do_POST(self) -> None:  # noqa: N802 (the base class calls it)
                status, text = self._take()
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _take(self) -> tuple[int, str]:
                seat = server._seat(self.headers.get("Authorization", ""))
                if seat is None:
                    return 401, f"the token does not belong to ${PROGRESS_TOKEN}\n"
                size = self.headers.get("Content-Length", "")
                if not size.isdigit() or int(size) > MAX_BODY_BYTES:
                    return 413, f"expected a Content-Length of at most {MAX_BODY_BYTES}\n"
                try:
                    report = parse(self.rfile.read(int(size)))
                except ValueError as error:
                    return 400, f"{error}\n"
                if report is None:
                    server._note()
                else:
                    server._on_report(seat, report)
                return 200, ""

        return Handler


def parse(body: bytes) -> Reported | None:
    """The report in a post; its step is -1 if the post has the number of steps, or the end, alone.
    None: it has neither, as Kubeflow's SDK posts. Raises ValueError for any other body without a
    step, and for a number that is none."""
    try:
        post = msgspec.json.decode(body, type=Post)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected the JSON of trainerStatus with metrics: {error}") from None
    metrics = {metric.name: metric.value for metric in post.trainer_status.metrics}
    step, status = _whole(metrics, "current_step") - 1, post.trainer_status
    percent = status.progress_percentage
    ended = percent is not None and percent >= 100
    if not (ended or metrics.keys() & {"current_step", "total_steps"}):
        if status.last_updated_time and percent is not None:
            return None
        raise ValueError(f"metrics: got {', '.join(metrics) or 'none'}; {STEPS}")
    return Reported(
        step=step,
        finished=step < 0 and ended,
        total_steps=_whole(metrics, "total_steps"),
        loss=_number(metrics, "loss"),
        source="posted",
    )


def _number(metrics: dict[str, str | float], name: str) -> float | None:
    if name not in metrics:
        return None
    try:
        value = float(metrics[name])
    except ValueError:
        raise ValueError(f"{name}: got {metrics[name]!r}; expected a number") from None
    return value if math.isfinite(value) else None


def _whole(metrics: dict[str, str | float], name: str) -> int:
    if name not in metrics:
        return 0
    value = _number(metrics, name)
    if value is None or value < 0 or value > 2**53 or value != int(value):
        raise ValueError(f"{name}: got {metrics[name]!r}; expected a whole number from 0")
    return int(value)


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY and no_proxy with the address of this server, where a proxy is set: a post, which
    has the token, would go to the proxy. Programs read one of the two; both get what either has."""
    if not any(name.lower() in PROXIES and value for name, value in environment.items()):
        return {}
    excluded = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for value in excluded for host in value.split(",") if host.strip()]
    value = "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, HOST]))
    return {"no_proxy": value, "NO_PROXY": value}
