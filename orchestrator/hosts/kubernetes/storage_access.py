"""A job's way to its store, among those of a thousand others.

Owns: that a store which does not answer holds up its own job only, and that this job says so. Must
not: know what is in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.checkpoint_store.async_store import ThreadedCheckpointStore
from holdfast.orchestrator.runtime.checkpoint_store.options import connects_at_once, storage_of
from holdfast.orchestrator.runtime.checkpoint_store.serial_executor import SerialExecutor
from holdfast.orchestrator.runtime.job_runtime import JobRuntime

from .status import ConditionState

TOLD_S = 30.0
"""Who waits for its store says so then; a takeover waits less long (assembly.LOOK_S)."""
PATIENCE_S = 600.0
"""Longer than drivers try (access.py): they know best why there is no answer."""


class JobStorage:
    """Of one job. `say` is called when it has to wait."""

    def __init__(self, owner: Owner, say: Callable[[ConditionState], None]) -> None:
        self._owner, self._say = owner, say
        self._strands: dict[str, SerialExecutor] = {}
        """By path. A call that hangs is waited for by the next attempt: however often a job tries
        a path, it holds one thread."""

    def tier(self, job: TrainingJob, path: str) -> ThreadedCheckpointStore:
        """The way to a path. Raises as storage_of, here or when it is first used."""
        strand, key = self._strands.setdefault(path, SerialExecutor()), self._owner.key
        if not connects_at_once(path):
            # Here: fsspec lets those that are made in one thread, with the same options, be one.
            storage = storage_of(job, path, key)
            return ThreadedCheckpointStore(lambda: storage, strand)
        return ThreadedCheckpointStore(lambda: storage_of(job, path, key), strand)

    async def prepare(self, assembly: JobRuntime, path: str, *, fresh: bool) -> None:
        """assembly.prepare, not for ever. Raises as that does, and HoldfastError."""
        text = f"{path} has not answered for {TOLD_S:g} s; the job begins when it does"
        late = ConditionState("pending", "WaitingForStorage", text)
        telling = asyncio.get_running_loop().call_later(TOLD_S, self._say, late)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await assembly.prepare(fresh=fresh)
        except TimeoutError:
            raise HoldfastError(f"{path}: no answer within {PATIENCE_S:g} s") from None
        finally:
            telling.cancel()
