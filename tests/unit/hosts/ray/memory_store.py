"""A job's key-value store in memory."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.journal.gcs_store import EPOCH


class MemoryStore(JobKeyValueStore):
    def __init__(self) -> None:
        super().__init__("job")
        self._values: dict[str, bytes] = {}
        self.on_chunk: Callable[[str], object] = lambda key: None
        """Called after each chunk of the journal was put, before its writer continues."""

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        if not key.startswith(EPOCH):
            self.on_chunk(key)

    def create(self, key: str, value: bytes) -> bool:
        return self._values.setdefault(key, value) is value

    def exists(self, key: str) -> bool:
        return key in self._values

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._values.pop(key, None)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._values if key.startswith(prefix))
