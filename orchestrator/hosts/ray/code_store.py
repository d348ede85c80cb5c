"""The code of a job that was edited while it runs, in the key-value store of Ray's head: a
runtime.code_sender.CodeStore, and how a command fills it.

The first code of a job is Ray's own working_dir. That cannot change while the job runs, so later
code goes to the agents over their own connections.
"""

from __future__ import annotations

import asyncio

from holdfast.orchestrator import limits
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.runtime.code_sender import CodeMissing, StoredPart

PREFIX = "code/"


class KeyValueCodeStore:
    """The code of one job."""

    def __init__(self, store: JobKeyValueStore) -> None:
        self._store = store

    async def part(self, code: str, number: int) -> StoredPart:
        """Raises CodeMissing."""
        count = await asyncio.to_thread(self._store.get, f"{PREFIX}{code}/parts")
        data = await asyncio.to_thread(self._store.get, f"{PREFIX}{code}/{number}")
        if count is None or data is None:
            raise CodeMissing(f"code {code[:12]}: part {number} is not in the key-value store")
        return StoredPart(data, int(count))

    def upload(self, code: str, archive: bytes) -> None:
        """Blocks for a round trip per part. What says how many there are comes last."""
        size = limits.CODE_PART_BYTES
        parts = [archive[at : at + size] for at in range(0, len(archive), size)]
        for number, part in enumerate(parts):
            self._store.put(f"{PREFIX}{code}/{number}", part)
        self._store.put(f"{PREFIX}{code}/parts", str(len(parts)).encode())

    def delete_others(self, *kept: str) -> None:
        """Delete all archives but these. Blocks."""
        keys = self._store.list(PREFIX)
        self._store.delete(*(key for key in keys if key.split("/")[1] not in kept))
