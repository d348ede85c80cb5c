"""Places of journals: files, a ConfigMap of a fake API server, keys in a dictionary."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.orchestrator.core.events import NodeLost
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal, Store, read
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.parts import is_installed

_JOURNAL = "holdfast.orchestrator.journal"
_STORES = {"files": "file_store", "configmap": "configmap_store", "gcs": "gcs_store"}
KINDS = [kind for kind, name in _STORES.items() if is_installed(f"{_JOURNAL}.{name}")]
PATH = "/api/v1/namespaces/team/configmaps/llm-journal"


def record(number: int) -> Record:
    return Record(number, NodeLost(node=f"node-{number}", cause="gone", detail="x" * 100))


class Place:
    """Place of the journal of one job, for any number of controllers and readers."""

    def __init__(self, kind: str, directory: Path, store: Callable[[], Store], keeper: Any):
        self.kind, self.directory, self.store = kind, directory, store
        self.cluster: Any = None
        self.api = self.keys = keeper
        """The API server or dictionary that keeps the chunks; None: files do."""

    async def open(self) -> ChunkJournal:
        return await ChunkJournal.open(self.store())

    def read(self) -> tuple[int, list[int]]:
        """(records that the snapshot covers, times of the records since), by a reader."""
        store = self.store()
        if self.kind == "configmap":  # it is read only by its writer
            vars(store)["_data"] = self.api.objects[PATH]["binaryData"]
        chunks = read(store)
        store.close()
        times = [one.now_ns for chunk in chunks for one in chunk.records]
        return chunks[0].covered if chunks else 0, times

    def change(self, name: str, replace: Callable[[bytes], bytes]) -> None:
        """Change the data of the chunk whose name begins like this."""
        if self.kind == "configmap":
            data = self.api.objects[PATH]["binaryData"]
            (key,) = (key for key in data if key.startswith(name))
            data[key] = base64.b64encode(replace(base64.b64decode(data[key]))).decode()
        elif self.kind == "gcs":
            (key,) = self.keys.list(f"journal/{name}")
            self.keys._values[key] = replace(self.keys._values[key])
        else:
            (path,) = self.directory.glob("0*")
            path.write_bytes(replace(path.read_bytes()))


async def write(journal: ChunkJournal, *numbers: int) -> None:
    for number in numbers:
        journal.append(*record(number))
    await journal.commit()


@asynccontextmanager
async def opened_place(kind: str, directory: Path) -> AsyncIterator[Place]:
    place = directory / "journal"
    if kind == "files":
        yield Place(kind, place, lambda: FileStore(place), None)
    elif kind == "gcs":
        from holdfast.orchestrator.journal.gcs_store import GcsStore
        from tests.unit.hosts.ray.memory_store import MemoryStore

        keys = MemoryStore()
        yield Place(kind, place, lambda: GcsStore(keys, "llm"), keys)
    else:
        from holdfast.orchestrator.journal.configmap_store import ConfigMapStore
        from holdfast.orchestrator.kube.names import Owner
        from tests.unit.hosts.kubernetes.operator_harness import StatefulFakeApi
        from tests.unit.kube.fake_api import cluster_of

        api, owner = StatefulFakeApi(), Owner("team", "llm", "uid-team-llm")
        async with cluster_of(api) as cluster:
            opened = Place(kind, place, lambda: ConfigMapStore(cluster, owner), api)
            opened.cluster = cluster
            yield opened
