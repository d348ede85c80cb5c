"""Places of journals: files, a ConfigMap of a fake API server, keys in a dictionary."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.orchestrator.core.events import NodeLost
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal, Store, read
from holdfast.orchestrator.journal.configmap_store import ConfigMapStore
from holdfast.orchestrator.journal.file_store import FileStore
from holdfast.orchestrator.journal.gcs_store import GcsStore
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS
from holdfast.orchestrator.kube.names import Owner
from tests.unit.hosts.kubernetes.operator_harness import StatefulFakeApi
from tests.unit.hosts.ray.memory_store import MemoryStore
from tests.unit.kube.fake_api import cluster_of

KINDS = ("files", "configmap", "gcs")
OWNER = Owner("team", "llm", "uid-team-llm")
PATH = CONFIG_MAPS.path("team", "llm-journal")


def record(number: int) -> Record:
    return Record(number, NodeLost(node=f"node-{number}", cause="gone", detail="x" * 100))


class Place:
    """Place of the journal of one job, for any number of controllers and readers."""

    def __init__(self, kind: str, directory: Path, cluster: KubeClient, api: StatefulFakeApi):
        self.kind, self.directory, self.cluster, self.api = kind, directory, cluster, api
        self.keys = MemoryStore()

    def store(self) -> Store:
        if self.kind == "files":
            return FileStore(self.directory)
        if self.kind == "gcs":
            return GcsStore(self.keys, "llm")
        return ConfigMapStore(self.cluster, OWNER)

    async def open(self) -> ChunkJournal:
        return await ChunkJournal.open(self.store())

    def read(self) -> tuple[int, list[int]]:
        """(records that the snapshot covers, times of the records since), by a reader."""
        store = self.store()
        if isinstance(store, ConfigMapStore):  # it is read only by its writer
            store._data = self.api.objects[PATH]["binaryData"]
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


def play(kind: str, directory: Path, scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        async with _place(kind, directory) as place:
            await scenario(place)

    asyncio.run(main())


@asynccontextmanager
async def _place(kind: str, directory: Path) -> AsyncIterator[Place]:
    api = StatefulFakeApi()
    async with cluster_of(api) as cluster:
        yield Place(kind, directory / "journal", cluster, api)
