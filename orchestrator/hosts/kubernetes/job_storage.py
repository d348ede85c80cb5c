"""The checkpoint storage of one job of an operator. Storage that does not answer holds up this job
only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.kubernetes.pods import PodSettings
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    SerialExecutor,
    ThreadedCheckpointStore,
)
from holdfast.orchestrator.runtime.checkpoint_store.options import connects_at_once
from holdfast.orchestrator.runtime.checkpoint_store.store import storage_of
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from . import storage_access
from .status import ConditionState


class JobStorage:
    """One per reconciler."""

    def __init__(
        self, owner: Owner, settings: PodSettings, report: Callable[[ConditionState], None]
    ) -> None:
        """`report`: called when the job has to wait for its storage."""
        self._owner, self._settings, self._report = owner, settings, report
        self._executors: dict[str, SerialExecutor] = {}
        """Executors by path. The next attempt waits for a call that hangs: a job holds one thread,
        however often it tries a path."""

    def store(self, job: TrainingJob, path: str) -> ThreadedCheckpointStore:
        """The storage at a path. Raises as storage_of, here or at its first use."""
        executor, key = self._executors.setdefault(path, SerialExecutor()), self._owner.key
        beneath = storage_access.directory_above(job, self._settings, path)
        if not connects_at_once(path):
            # fsspec shares instances that one thread creates with the same options.
            storage = storage_of(job, path, key, beneath)
            return ThreadedCheckpointStore(lambda: storage, executor)
        return ThreadedCheckpointStore(lambda: storage_of(job, path, key, beneath), executor)

    async def prepare(
        self, runtime: JobRuntime, path: str, *, fresh: bool, notice_s: float, timeout_s: float
    ) -> None:
        """`runtime.prepare` with a time limit; after `notice_s` the wait is reported. Raises what
        `runtime.prepare` raises, and HoldfastError."""
        text = f"{path} has not answered for {notice_s:g} s; the job starts when it does"
        waiting = ConditionState("pending", "WaitingForStorage", text)
        notice = asyncio.get_running_loop().call_later(notice_s, self._report, waiting)
        try:
            async with asyncio.timeout(timeout_s):
                await runtime.prepare(fresh=fresh)
        except TimeoutError:
            raise HoldfastError(f"{path}: no answer within {timeout_s:g} s") from None
        finally:
            notice.cancel()
