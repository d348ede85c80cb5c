"""The Jobs API of a Ray cluster: a command handed in over HTTP, its output and its end.

Owns: speaking to it, and its errors in words. Must not: know what the command does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from . import runtime_env

POLL_S = 0.5
"""The API tells nobody that a job has ended."""
FETCH_S = 2.0
"""Between readings of a whole log, where it cannot be streamed."""
QUIET_S = 20.0
"""A log stream that says nothing for this long may have lost its other end."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
SETUP_FAILED = "runtime_env"
WATCHED_S = 10.0
CHATTY = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging", "ray.client_builder",
)  # fmt: skip
"""They tell of every upload, and of every stream's end."""
SERVER_FAILED = re.compile(r"status code 5\d\d: (?:Traceback.* )?(.*)$")
"""What comes back when it was not the request's fault, but Ray answers 500 to bad ones too."""
PREAMBLE = re.compile(r"[^\t]*\tINFO job_manager\.py:\d+ -- |Running entrypoint for job ")
"""Lines that Ray writes into a job's log before its program does; older ones only the first."""
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray's client prefers these to the address that it is given."""


class Outcome(NamedTuple):
    status: str
    message: str
    exit_code: int


class RuntimeEnvFailed(HoldfastError):
    """The cluster could not build what the job wants around it."""


class ServerGone(HoldfastError):
    """The job server does not answer any more."""


class JobsApi:
    """One cluster's."""

    def __init__(self, address: str) -> None:
        """`auto`: the cluster that this machine belongs to. Raises UserError when nobody answers,
        or when the versions do not go together."""
        import ray
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient

        from .cluster import check_listens, check_version

        check_version(ray.__version__)
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        if "://" not in address and address != "auto":
            check_listens(address)
        self._address = address
        dashboard = "the address of a Ray cluster's dashboard, such as http://HEAD:8265"
        try:
            with _no_overrides("://" in address):
                self._client: Any = JobSubmissionClient(address)
                served = self._served()
        # An answer that is not Ray's: no JSON (an OSError of requests too), no version in it.
        except (OSError, KeyError, ValueError, TypeError) as error:
            fix = "`ray status` on the head says whether it runs; the dashboard must run too"
            got = f"{address} ({_short(error)})"
            raise UserError(str(Problem("--ray", got, dashboard, fix))) from None
        except (RuntimeError, RayError) as error:
            versions = f"a cluster of Ray {ray.__version__}, or the cluster's version here"
            told = str(error).lower()
            expected = versions if "version" in told or "not supported" in told else dashboard
            got = f"{address} ({_short(error)})"
            raise UserError(str(Problem("--ray", got, expected))) from None
        if served:
            check_version(served, cluster=address)

    def _served(self) -> str:
        """The cluster's Ray, which may be another than this one; empty where it cannot be told.
        Ray's client itself asks for 1.9 or newer, and newer ones keep what they were told."""
        told = getattr(self._client, "_server_ray_version", None)
        if told is None and (ask := getattr(self._client, "_do_request", None)):
            told = ask("GET", "/api/version").json()["ray_version"]
        return str(told or "")

    def submit(
        self, name: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> str:
        """Raises UserError for what Ray does not take, HoldfastError when the cluster fails."""
        try:
            submitted: str = self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=name,
                runtime_env=runtime_env,
                metadata=metadata,
            )
        except OSError as error:
            if "requests" not in type(error).__module__:
                raise  # a file of the working_dir that cannot be read
            raise self._gone(error) from None
        except RuntimeError as error:
            if (why := SERVER_FAILED.search(_short(error))) is None:
                expected = "a job that this cluster's Ray takes"
                raise UserError(str(Problem("--ray", _short(error), expected))) from None
            raise HoldfastError(
                f"the cluster's job server cannot take the job now: {why[1]}"
            ) from None
        except (ValueError, TypeError) as error:
            expected = "one that this cluster's Ray takes"
            raise UserError(str(Problem("--runtime-env", _short(error), expected))) from None
        return submitted

    def running(self, key: str, value: str) -> str | None:
        """A Ray job with that metadata which has not ended. Raises ServerGone."""
        for one in self._asked(self._client.list_jobs):
            if str(one.status) not in ENDED and (one.metadata or {}).get(key) == value:
                return str(one.submission_id or one.job_id)
        return None

    def wait(self, name: str) -> tuple[Outcome, str]:
        """How it ended, and what its program has said. Raises RuntimeEnvFailed when it could not
        even begin, ServerGone."""
        while (outcome := self._outcome(name)) is None:
            time.sleep(POLL_S)
        said: list[str] = []
        log = _Log(said.append, own=True)
        log.whole(self._asked(self._client.get_job_logs, name))
        log.end()
        return outcome, "".join(said)

    def follow(self, name: str, on_text: Callable[[str], None], *, own: bool = False) -> Outcome:
        """Its output while it comes, until it has ended; `own`: without the lines that Ray puts
        before it. Raises as `wait`."""
        log = _Log(on_text, own=own)
        whole = asyncio.run(self._stream(name, log))
        while True:
            outcome = self._outcome(name)
            if outcome is None or not whole:
                # A proxy cut the stream, or knows of none.
                log.whole(self._asked(self._client.get_job_logs, name))
            if outcome is not None:
                log.end()
                return outcome
            whole = False
            time.sleep(FETCH_S)

    async def _stream(self, name: str, log: _Log) -> bool:
        """False: there may be more to tell than it did."""
        import aiohttp

        lines = aiter(self._client.tail_job_logs(name))
        try:
            while True:
                coming = asyncio.ensure_future(anext(lines))
                while not (await asyncio.wait([coming], timeout=QUIET_S))[0]:
                    if await asyncio.to_thread(self._outcome, name) is not None:
                        return False
                log.more(coming.result())
        except StopAsyncIteration:
            return True
        except (aiohttp.ClientError, OSError, RuntimeError):
            return False

    def stop(self, name: str) -> None:
        """Raises ServerGone."""
        self._asked(self._client.stop_job, name)

    def tidy(self, prefix: str) -> None:
        """Forget those of that name which have ended. Not the last ones: Ray's job server watches
        a job for a while after its end, and would report one that is gone as failed. Raises
        nothing: another command may be faster, and what stays the next one forgets."""
        before_ms = (time.time() - WATCHED_S) * 1000
        with suppress(HoldfastError):
            for one in self._asked(self._client.list_jobs):
                ended = str(one.status) in ENDED and (one.end_time or 0) < before_ms
                if ended and (one.submission_id or "").startswith(prefix):
                    with suppress(HoldfastError):
                        self._asked(self._client.delete_job, one.submission_id)

    def _outcome(self, name: str) -> Outcome | None:
        """None: it has not ended."""
        info = self._asked(self._client.get_job_info, name)
        if info.status not in ENDED:
            return None
        message = info.message or ""
        if SETUP_FAILED in message and info.driver_exit_code is None:
            raise RuntimeEnvFailed(
                f"the cluster could not build the job's runtime env, nothing was started: "
                f"{runtime_env.words(message)}"
            )
        code = info.driver_exit_code
        return Outcome(str(info.status), message, 1 if code is None else int(code))

    def _asked(self, question: Callable[..., Any], *arguments: str) -> Any:
        from ray.exceptions import RayError

        try:
            return question(*arguments)
        except OSError as error:  # all of requests' are
            raise self._gone(error) from None
        except (RuntimeError, RayError) as error:  # an answer that is no answer; no permission
            why = SERVER_FAILED.search(_short(error))
            raise HoldfastError(
                f"the job server at {self._address} cannot answer: {why[1] if why else error}"
            ) from None

    def _gone(self, error: Exception) -> ServerGone:
        return ServerGone(
            f"the job server at {self._address} does not answer any more ({_reason(error)}). What "
            f"it has taken goes on as long as the cluster does; `holdfast status --ray ...` says so"
        )


class _Log:
    """How much of a job's log has been told, however it comes."""

    def __init__(self, on_text: Callable[[str], None], *, own: bool) -> None:
        self._on_text, self._preamble = on_text, own
        self._kept, self._num_read = "", 0

    def whole(self, text: str) -> None:
        """All of it, from its beginning."""
        self.more(text[self._num_read :])

    def more(self, text: str) -> None:
        self._num_read += len(text)
        if self._preamble:
            self._kept += text
            while self._preamble and "\n" in self._kept:
                line, _, rest = self._kept.partition("\n")
                if PREAMBLE.match(line):
                    self._kept = rest
                else:
                    self._preamble = False
            if self._preamble:
                return
            text, self._kept = self._kept, ""
        if text:
            self._on_text(text)

    def end(self) -> None:
        """Nothing more comes: also a first line without an end is told."""
        if self._kept and not PREAMBLE.match(self._kept):
            self._on_text(self._kept)
        self._kept = ""


@contextmanager
def _no_overrides(wanted: bool) -> Iterator[None]:
    """Ray's client without the environment that would send it elsewhere."""
    before = {name: os.environ.pop(name) for name in OVERRIDES if wanted and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _reason(error: BaseException) -> str:
    """The innermost cause: requests and urllib3 wrap it several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return _short(error)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
