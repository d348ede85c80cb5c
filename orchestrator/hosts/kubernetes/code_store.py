"""Reads a job's uploaded code for its agents: a runtime.code_sender.CodeStore."""

from __future__ import annotations

import asyncio

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube import code_parts
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime.code_sender import CodeMissing, StoredPart

KEEP_S = 60.0
"""Parts stay in memory for so long after their last use: all nodes of a launch ask for them at
about the same time."""
WAIT_S = 10.0
"""Wait for the upload, which comes right after the job."""
LOOK_S = 0.2


class ClusterCodeStore:
    """The code of one job."""

    def __init__(self, cluster: KubeClient, owner: Owner) -> None:
        self._cluster, self._owner = cluster, owner
        self._parts: dict[tuple[str, int], StoredPart] = {}
        self._reading = asyncio.Lock()
        self._forgetting: asyncio.TimerHandle | None = None

    async def part(self, code: str, number: int) -> StoredPart:
        """Raises CodeMissing and ApiError."""
        async with self._reading:
            found = self._parts.get((code, number))
            if found is None:
                found = self._parts[code, number] = await self._read(code, number)
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(KEEP_S, self._parts.clear)
        return found

    async def uploaded(self, code: str) -> None:
        """Wait until the code is there. Raises HoldfastError when it does not come; another attempt
        may find it. Raises ApiError."""
        for _look in range(round(WAIT_S / LOOK_S)):
            if await self._is_there(code):
                return
            await asyncio.sleep(LOOK_S)
        raise HoldfastError(
            f"spec.code: {code[:12]} was not uploaded; `holdfast run --kubernetes` uploads code "
            f"and writes this field; without it the job runs what is in its image"
        )

    async def _is_there(self, code: str) -> bool:
        name = code_parts.part_name(self._owner.name, code, 0)
        found = await self._cluster.find(CONFIG_MAPS, self._owner.namespace, name)
        return found is not None and self._owner.owns(found)

    async def _read(self, code: str, number: int) -> StoredPart:
        name = code_parts.part_name(self._owner.name, code, number)
        where = f"ConfigMap {self._owner.namespace}/{name}"
        found = await self._cluster.find(CONFIG_MAPS, self._owner.namespace, name)
        if found is None:
            raise CodeMissing(
                f"{where}: is not there; upload the code with `holdfast again "
                f"{self._owner.name} --kubernetes`"
            )
        if not self._owner.owns(found):
            raise CodeMissing(f"{where}: belongs to another job, or to an earlier one of this name")
        try:
            return StoredPart(*code_parts.read_part(found))
        except ValueError as error:
            raise CodeMissing(f"{where}: holds no part of an archive ({error})") from None
