"""Client of a Ray cluster's Jobs API over HTTP: submitting a Ray job, its output and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from holdfast.orchestrator.errors import HoldfastError, UserError

from .actors import runtime_env_error

POLL_S = 0.5
"""The API sends no event when a Ray job ends."""
FETCH_S = 2.0
"""Seconds between readings of a whole log that cannot be streamed."""
QUIET_S = 20.0
"""A log stream without output for this long may have lost its connection."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
KEPT_S = 10.0
"""Ray's job server watches a Ray job for a while after its end."""
CHATTY = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging", "ray.client_builder",
)  # fmt: skip
"""Ray's loggers that report every upload and the end of every stream."""
SERVER_FAILED = re.compile(r"status code 5\d\d: (?:Traceback.* )?(.*)$")
"""Ray answers 500 also to invalid requests; this one was the server's failure."""
PREAMBLE = re.compile(r"[^\t]*\tINFO job_manager\.py:\d+ -- |Running entrypoint for job ")
"""Lines that Ray writes into a job's log before its program does; older ones only the first."""
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray's client prefers these to the address that it is given."""


class Outcome(NamedTuple):
    status: str
    message: str
    exit_code: int


class RuntimeEnvFailed(HoldfastError):
    """The cluster could not build the job's runtime env."""


class ServerGone(HoldfastError):
    """The job server no longer answers."""


class JobsApi:
    """The Jobs API of one cluster."""

    def __init__(self, address: str) -> None:
        """`auto`: the cluster that this machine belongs to. Raises UserError when no job server
        answers, or when its version does not fit."""
        import ray
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient

        from .cluster import check_listens, check_version, token_problem

        check_version(ray.__version__)
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        if not address.startswith(("http://", "https://")) and address != "auto":
            check_listens(address)  # Ray connects as a driver, to find the dashboard
        self._address = address
        dashboard = "the address of a Ray cluster's dashboard, such as http://HEAD:8265"
        try:
            with without_overrides("://" in address):
                self._client: Any = JobSubmissionClient(address)
                version = self._server_version()
        # An answer that is not Ray's: no JSON (an OSError of requests too), no version in it.
        except (OSError, KeyError, ValueError, TypeError) as error:
            if (refused := _token_refused(error)) is not None:
                raise token_problem(address, refused=refused) from None
            fix = "`ray status` on the head shows whether it runs; the dashboard must run too"
            raise UserError.of("--ray", f"{address} ({_short(error)})", dashboard, fix) from None
        except (RuntimeError, RayError) as error:
            if (refused := _token_refused(error)) is not None:
                raise token_problem(address, refused=refused) from None
            versions = f"a cluster of Ray {ray.__version__}, or the cluster's version here"
            text = str(error).lower()
            expected = versions if "version" in text or "not supported" in text else dashboard
            raise UserError.of("--ray", f"{address} ({_short(error)})", expected) from None
        if version:
            check_version(version, cluster=address)

    def _server_version(self) -> str:
        """The cluster's Ray version; empty where it is unknown. Newer Ray clients keep it."""
        version = getattr(self._client, "_server_ray_version", None)
        if version is None and (request := getattr(self._client, "_do_request", None)):
            version = request("GET", "/api/version").json()["ray_version"]
        return str(version or "")

    def submit(
        self, name: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> str:
        """Raises UserError for what Ray rejects, HoldfastError when the cluster fails."""
        try:
            submitted: str = self._client.submit_job(
                entrypoint=entrypoint, submission_id=name, runtime_env=runtime_env,
                metadata=metadata,
            )  # fmt: skip
        except OSError as error:
            if "requests" not in type(error).__module__:
                raise  # a file of the working_dir that cannot be read
            raise self._gone(error) from None
        except RuntimeError as error:
            if (why := SERVER_FAILED.search(_short(error))) is None:
                expected = "a job that this cluster's Ray takes"
                is_large = "status code 413" in str(error)
                fix = "name data in .gitignore or in excludes" if is_large else ""
                raise UserError.of("--ray", _short(error), expected, fix) from None
            raise HoldfastError(
                f"the cluster's job server cannot take the job now: {why[1]}"
            ) from None
        except (ValueError, TypeError) as error:
            expected = "one that this cluster's Ray takes"
            raise UserError.of("--runtime-env", _short(error), expected) from None
        return submitted

    def running(self, key: str, value: str) -> str | None:
        """A Ray job with that metadata which has not ended. Raises ServerGone."""
        for job in self._call(self._client.list_jobs):
            if str(job.status) not in ENDED and (job.metadata or {}).get(key) == value:
                return str(job.submission_id or job.job_id)
        return None

    def wait(self, name: str) -> tuple[Outcome, str]:
        """Outcome of the Ray job, and its program's output. Raises RuntimeEnvFailed when the
        program was not started, ServerGone."""
        while (outcome := self._outcome(name)) is None:
            time.sleep(POLL_S)
        output: list[str] = []
        log = JobLog(output.append, own=True)
        log.read_whole(self._call(self._client.get_job_logs, name))
        log.end()
        return outcome, "".join(output)

    def follow(self, name: str, on_text: Callable[[str], None], *, own: bool = False) -> Outcome:
        """Print the job's output until the job has ended; `own`: without the lines that Ray
        puts before it. Raises as `wait`."""
        log = JobLog(on_text, own=own)
        complete = asyncio.run(self._stream(name, log))
        while True:
            outcome = self._outcome(name)
            if outcome is None or not complete:
                # A proxy cut the stream, or supports no WebSockets.
                log.read_whole(self._call(self._client.get_job_logs, name))
            if outcome is not None:
                log.end()
                return outcome
            complete = False
            time.sleep(FETCH_S)

    async def _stream(self, name: str, log: JobLog) -> bool:
        """Returns whether the stream had the whole log."""
        import aiohttp

        lines = aiter(self._client.tail_job_logs(name))
        try:
            while True:
                line = asyncio.ensure_future(anext(lines))
                while not (await asyncio.wait([line], timeout=QUIET_S))[0]:
                    if await asyncio.to_thread(self._outcome, name) is not None:
                        return False
                log.read(line.result())
        except StopAsyncIteration:
            return True
        except (aiohttp.ClientError, OSError, RuntimeError):
            return False

    def stop(self, name: str) -> None:
        """Raises ServerGone."""
        self._call(self._client.stop_job, name)

    def delete_ended(self, prefix: str) -> None:
        """Delete Ray jobs with that name which have ended, but not within KEPT_S: Ray would report
        a deleted one as failed. Raises nothing: another command may have deleted it, and what is
        left the next command deletes."""
        before_ms = (time.time() - KEPT_S) * 1000
        with suppress(HoldfastError):
            for job in self._call(self._client.list_jobs):
                ended = str(job.status) in ENDED and (job.end_time or 0) < before_ms
                if ended and (job.submission_id or "").startswith(prefix):
                    with suppress(HoldfastError):
                        self._call(self._client.delete_job, job.submission_id)

    def _outcome(self, name: str) -> Outcome | None:
        """None: it has not ended."""
        info = self._call(self._client.get_job_info, name)
        if info.status not in ENDED:
            return None
        message = info.message or ""
        if "runtime_env" in message and info.driver_exit_code is None:
            raise RuntimeEnvFailed(
                f"the cluster could not build the job's runtime env, nothing was started: "
                f"{runtime_env_error(message)}"
            )
        code = info.driver_exit_code
        return Outcome(str(info.status), message, 1 if code is None else int(code))

    def _call(self, method: Callable[..., Any], *arguments: str) -> Any:
        from ray.exceptions import RayError

        try:
            return method(*arguments)
        except OSError as error:  # all errors of requests are OSErrors
            raise self._gone(error) from None
        except (RuntimeError, RayError) as error:  # an error status, or no permission
            why = SERVER_FAILED.search(_short(error))
            raise HoldfastError(
                f"the job server at {self._address} cannot answer: {why[1] if why else error}"
            ) from None

    def _gone(self, error: Exception) -> ServerGone:
        return ServerGone(
            f"the job server at {self._address} does not answer any more ({_reason(error)}). Jobs "
            f"it has accepted continue with the cluster; `holdfast status --ray ...` shows them"
        )


class JobLog:
    """Passes each part of a job's log on once, whether it is streamed or read as a whole."""

    def __init__(self, on_text: Callable[[str], None], *, own: bool) -> None:
        """`own`: without the lines that Ray writes first."""
        self._on_text, self._in_preamble = on_text, own
        self._kept, self._num_read = "", 0

    def read_whole(self, text: str) -> None:
        """The whole log, from its beginning."""
        self.read(text[self._num_read :])

    def read(self, text: str) -> None:
        self._num_read += len(text)
        if self._in_preamble:
            self._kept += text
            while self._in_preamble and "\n" in self._kept:
                line, _, rest = self._kept.partition("\n")
                if PREAMBLE.match(line):
                    self._kept = rest
                else:
                    self._in_preamble = False
            if self._in_preamble:
                return
            text, self._kept = self._kept, ""
        if text:
            self._on_text(text)

    def end(self) -> None:
        """The log is complete: pass on a first line without a line break, too."""
        if self._kept and not PREAMBLE.match(self._kept):
            self._on_text(self._kept)
        self._kept = ""


@contextmanager
def without_overrides(wanted: bool) -> Iterator[None]:
    """Ray's client without the environment that would send it elsewhere."""
    before = {name: os.environ.pop(name) for name in OVERRIDES if wanted and name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _token_refused(error: Exception) -> bool | None:
    """True if a cluster with token authentication refused the token, False if it got none; None for
    every other error. Rays before 2.52 raise an error of requests."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if type(error).__name__ == "AuthenticationError":
        status = 403 if "Authentication failed" in str(error) else 401
    return {401: False, 403: True}.get(status or 0)


def _reason(error: BaseException) -> str:
    """The innermost cause: requests and urllib3 wrap it several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return _short(error)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
