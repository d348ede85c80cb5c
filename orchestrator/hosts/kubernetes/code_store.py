"""A job's uploaded code, in ConfigMaps of the job's own namespace.

Why ConfigMaps: who creates a job can create them, with no other storage to be reached and no other
credentials, and the API server deletes them with the job. They are immutable, and named by the
archive: an archive is uploaded once. Part 0 is written last, so an archive that has one is whole.
"""

from __future__ import annotations

import asyncio
import base64

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS, Conflict
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.code_sender import CodeMissing, StoredPart

PART = "part"
"""Key of the bytes."""
NUM_PARTS = "holdfast.dev/parts"
"""Annotation: how many ConfigMaps the archive has."""
LABEL_CODE = "holdfast.dev/code"
"""Label: the first digits of the archive's name."""
DIGITS = 16
"""Digits of an archive's name in names of ConfigMaps; agents check all 64."""
KEEP_S = 60.0
"""Parts stay in memory for so long after their last use: all nodes of a launch ask for them at
about the same time."""
WAIT_S = 10.0
"""Wait for the upload, which comes right after the job."""
LOOK_S = 0.2


class ClusterCodeStore:
    """The code of one job: a runtime.code_sender.CodeStore."""

    def __init__(self, cluster: KubeClient, owner: Owner) -> None:
        self._cluster, self._owner = cluster, owner
        self._parts: dict[tuple[str, int], StoredPart] = {}
        self._reading = asyncio.Lock()
        self._forgetting: asyncio.TimerHandle | None = None

    async def part(self, code: str, number: int) -> StoredPart:
        """Raises CodeMissing and ApiError."""
        async with self._reading:
            part = self._parts.get((code, number))
            if part is None:
                part = self._parts[code, number] = await self._read(code, number)
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(KEEP_S, self._parts.clear)
        return part

    async def uploaded(self, code: str) -> None:
        """Wait until the code is there. Raises HoldfastError when it does not come; another attempt
        may find it. Raises ApiError."""
        for _look in range(round(WAIT_S / LOOK_S)):
            document = await self._find(self._name(code, 0))
            if document is not None and self._owner.owns(document):
                return
            await asyncio.sleep(LOOK_S)
        raise HoldfastError(
            f"spec.code: {code[:12]} was not uploaded; `holdfast run --kubernetes` uploads code "
            f"and writes this field; without it the job runs what is in its image"
        )

    async def upload(self, code: str, archive: bytes) -> None:
        """Create what is not there yet. Raises ApiError, and UserError if another object has a
        name."""
        for document in self.documents(code, archive):
            name = document["metadata"]["name"]
            try:
                await self._cluster.create(CONFIG_MAPS, self._owner.namespace, document)
            except Conflict:
                other = await self._cluster.get(CONFIG_MAPS, self._owner.namespace, name)
                if not self._owner.owns(other):
                    got = f"ConfigMap {self._owner.namespace}/{name}, which belongs to another job"
                    fix = "an earlier job of this name may be being deleted; try again in a moment"
                    raise UserError.of("code", got, "a name that is free", fix) from None

    async def delete_others(self, *kept: str) -> None:
        """Delete all archives but these. Raises ApiError."""
        selector = f"{names.LABEL_JOB}={self._owner.name},{LABEL_CODE}"
        documents, _version = await self._cluster.list_all(
            CONFIG_MAPS, self._owner.namespace, selector
        )
        digits = [code[:DIGITS] for code in kept if code]
        for document in filter(self._owner.owns, documents):
            metadata = document["metadata"]
            if metadata["labels"][LABEL_CODE] not in digits:
                await self._cluster.delete(
                    CONFIG_MAPS, self._owner.namespace, metadata["name"], uid=metadata["uid"]
                )

    def documents(self, code: str, archive: bytes) -> list[Document]:
        """The ConfigMaps of an archive, in the order in which they are to be created."""
        size, owner = limits.CODE_PART_BYTES, self._owner
        parts = [archive[at : at + size] for at in range(0, len(archive), size)]
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "immutable": True,
                "metadata": {
                    "name": self._name(code, number),
                    "namespace": owner.namespace,
                    "labels": {names.LABEL_JOB: owner.name, LABEL_CODE: code[:DIGITS]},
                    "annotations": {NUM_PARTS: str(len(parts))},
                    "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
                },
                "binaryData": {PART: base64.b64encode(part).decode()},
            }
            for number, part in reversed(list(enumerate(parts)))
        ]

    def _name(self, code: str, number: int) -> str:
        return f"{self._owner.name}-code-{code[:DIGITS]}-{number}"

    async def _find(self, name: str) -> Document | None:
        return await self._cluster.find(CONFIG_MAPS, self._owner.namespace, name)

    async def _read(self, code: str, number: int) -> StoredPart:
        name = self._name(code, number)
        where = f"ConfigMap {self._owner.namespace}/{name}"
        document = await self._find(name)
        if document is None:
            raise CodeMissing(
                f"{where}: is not there; upload the code with `holdfast again "
                f"{self._owner.name} --kubernetes`"
            )
        if not self._owner.owns(document):
            raise CodeMissing(f"{where}: belongs to another job, or to an earlier one of this name")
        try:
            data = base64.b64decode((document.get("binaryData") or {})[PART], validate=True)
            annotations = document["metadata"].get("annotations") or {}
            return StoredPart(data, int(annotations[NUM_PARTS]))
        except (KeyError, TypeError, ValueError) as error:
            raise CodeMissing(f"{where}: holds no part of an archive (no {error})") from None
