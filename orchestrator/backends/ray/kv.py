"""The key-value store of a Ray cluster's head (GCS), as one job sees it.

Owns: key names and the way there: calls block for a round trip, so a loop makes them in a thread.
Must not: know what is stored.

Ray keeps it in the head's memory, or in Redis where the cluster has GCS fault tolerance: then it
outlives the head. `ray.experimental.internal_kv` is what Ray's own libraries (Serve, Tune, the job
server) build on; it is not part of the documented API, so everything that touches it is here.
"""

from __future__ import annotations

from typing import Any

from . import names

_NAMESPACE = names.NAMESPACE.encode()
RECORD = "record"
"""What was submitted (ControllerOrder, msgpack). Who creates it has the job's name."""
ENDED = "ended"
"""JSON {view, refusal}: how it ended. Without it there is, or was, a controller."""


class JobKeyValueStore:
    """The keys of one job."""

    def __init__(self, job: str) -> None:
        self._prefix = f"jobs/{job}/"

    def get(self, key: str) -> bytes | None:
        found: bytes | None = _kv()._internal_kv_get(self._key(key), namespace=_NAMESPACE)
        return found

    def put(self, key: str, value: bytes) -> None:
        _kv()._internal_kv_put(self._key(key), value, overwrite=True, namespace=_NAMESPACE)

    def create(self, key: str, value: bytes) -> bool:
        """Put it where there is none; False: there is one, and it stays."""
        exists: bool = _kv()._internal_kv_put(
            self._key(key), value, overwrite=False, namespace=_NAMESPACE
        )
        return not exists

    def exists(self, key: str) -> bool:
        return bool(_kv()._internal_kv_exists(self._key(key), namespace=_NAMESPACE))

    def delete(self, *keys: str) -> None:
        for key in keys:
            _kv()._internal_kv_del(self._key(key), namespace=_NAMESPACE)

    def list(self, prefix: str) -> list[str]:
        """Sorted, without the job's own prefix."""
        found = _kv()._internal_kv_list(self._key(prefix), namespace=_NAMESPACE)
        return sorted(key.decode().removeprefix(self._prefix) for key in found)

    def clear(self) -> None:
        """Forget the job. Its record last, which has its name, and how it ended just before: when
        this is interrupted, it is still a job that has ended."""
        self.delete(*sorted(self.list(""), key=lambda key: (key == RECORD, key == ENDED)))

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()


def jobs() -> list[str]:
    """Names of the jobs that have a record, sorted."""
    found = _kv()._internal_kv_list(b"jobs/", namespace=_NAMESPACE)
    parts = [key.decode().split("/") for key in found]
    return sorted(part[1] for part in parts if part[2:] == [RECORD])


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
