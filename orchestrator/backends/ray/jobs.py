"""The Jobs API of a Ray cluster: a command handed in over HTTP, its output and its end.

Owns: speaking to it, and its errors in words. Must not: know what the command does.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...protocol.errors import HoldfastError, Problem, UserError

POLL_S = 0.5
"""The API cannot be waited on but through its log stream, which some proxies cut."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
SETUP_FAILED = "runtime_env"
WATCHED_S = 10.0
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""They tell of every upload."""
SERVER_FAILED = re.compile(r"status code 5\d\d: (?:Traceback.* )?(.*)$")
"""What comes back when it was not the request's fault, but Ray answers 500 to bad ones too."""
PREAMBLE = re.compile(r".*?^Running entrypoint for job [^\n]*\n", re.MULTILINE | re.DOTALL)
"""What Ray writes into a job's log before its program does."""


class Outcome(NamedTuple):
    status: str
    message: str
    exit_code: int


class RuntimeEnvFailed(HoldfastError):
    """The cluster could not build what the job wants around it."""


class Api:
    """One cluster's."""

    def __init__(self, address: str) -> None:
        """`auto`: the cluster that this machine belongs to. Raises UserError when nobody answers,
        or when the versions do not go together."""
        import ray
        from ray.job_submission import JobSubmissionClient

        from .cluster import check_version

        check_version(ray.__version__)
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self._client: Any = JobSubmissionClient(address)
        except ConnectionError as error:
            fix = "`ray status` on the head says whether it runs; the dashboard must run too"
            got = f"{address} ({_short(error)})"
            expected = "the address of a Ray cluster's dashboard, such as http://HEAD:8265"
            raise UserError(str(Problem("--ray", got, expected, fix))) from None
        except RuntimeError as error:
            if "version" not in str(error).lower() and "not supported" not in str(error).lower():
                raise
            expected = f"a cluster of Ray {ray.__version__}, or the cluster's version here"
            got = f"{address} ({_short(error)})"
            raise UserError(str(Problem("--ray", got, expected))) from None

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
        """A Ray job with that metadata which has not ended."""
        for one in self._client.list_jobs():
            if str(one.status) not in ENDED and (one.metadata or {}).get(key) == value:
                return str(one.submission_id or one.job_id)
        return None

    def follow(self, name: str, on_text: Callable[[str], None], *, own: bool = False) -> Outcome:
        """Its output until it has ended; `own`: without the lines that Ray puts before it. Raises
        RuntimeEnvFailed when it could not even begin."""
        told = 0
        while True:
            info = self._client.get_job_info(name)
            text = self._client.get_job_logs(name)
            if own:
                text = PREAMBLE.sub("", text, count=1) if PREAMBLE.match(text) else ""
            if len(text) > told:
                on_text(text[told:])
                told = len(text)
            if info.status in ENDED:
                message = info.message or ""
                if SETUP_FAILED in message and info.driver_exit_code is None:
                    raise RuntimeEnvFailed(
                        f"the cluster could not build the job's runtime env, nothing was started: "
                        f"{message.strip()}"
                    )
                code = info.driver_exit_code
                return Outcome(str(info.status), message, 1 if code is None else int(code))
            time.sleep(POLL_S)

    def stop(self, name: str) -> None:
        self._client.stop_job(name)

    def tidy(self, prefix: str) -> None:
        """Forget those of that name which have ended. Not the last ones: Ray's job server watches
        a job for a while after its end, and would report one that is gone as failed."""
        before_ms = (time.time() - WATCHED_S) * 1000
        for one in self._client.list_jobs():
            ended = str(one.status) in ENDED and (one.end_time or 0) < before_ms
            if ended and (one.submission_id or "").startswith(prefix):
                self._client.delete_job(one.submission_id)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
