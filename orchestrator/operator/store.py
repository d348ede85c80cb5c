"""A job's way to its store, among those of a thousand others.

Owns: that a store which does not answer holds up its own job only, and that this job says so. Must
not: know what is in a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..backends.kubernetes.pods import Owner
from ..protocol.errors import HoldfastError
from ..protocol.spec import TrainingJob
from ..runtime.access import connects_at_once, storage_of
from ..runtime.assembly import Assembly
from ..runtime.strand import Strand
from ..runtime.tier import ThreadedTier
from .status import Verdict

TOLD_S = 30.0
"""Who waits for its store says so then; a takeover waits less long (assembly.LOOK_S)."""
PATIENCE_S = 600.0
"""Longer than drivers try (access.py): they know best why there is no answer."""


class Store:
    """Of one job. `say` is called when it has to wait."""

    def __init__(self, owner: Owner, say: Callable[[Verdict], None]) -> None:
        self._owner, self._say = owner, say
        self._strands: dict[str, Strand] = {}
        """By path. A call that hangs is waited for by the next attempt: however often a job tries
        a path, it holds one thread."""

    def tier(self, job: TrainingJob, path: str) -> ThreadedTier:
        """The way to a path. Raises as storage_of, here or when it is first used."""
        strand, key = self._strands.setdefault(path, Strand()), self._owner.key
        if not connects_at_once(path):
            # Here: fsspec lets those that are made in one thread, with the same options, be one.
            storage = storage_of(job, path, key)
            return ThreadedTier(lambda: storage, strand)
        return ThreadedTier(lambda: storage_of(job, path, key), strand)

    async def prepare(self, assembly: Assembly, path: str, *, fresh: bool) -> None:
        """assembly.prepare, not for ever. Raises as that does, and HoldfastError."""
        text = f"{path} has not answered for {TOLD_S:g} s; the job begins when it does"
        late = Verdict("pending", "WaitingForStorage", text)
        telling = asyncio.get_running_loop().call_later(TOLD_S, self._say, late)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await assembly.prepare(fresh=fresh)
        except TimeoutError:
            raise HoldfastError(f"{path}: no answer within {PATIENCE_S:g} s") from None
        finally:
            telling.cancel()
