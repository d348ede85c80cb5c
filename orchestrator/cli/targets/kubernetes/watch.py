"""Following one object of a cluster until something is true of it.

Owns: resuming a watch, and what is waited for between two tries. Must not: know what the object
means. An API server that does not answer for a while ends nothing: the job goes on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS, Expired, TooBusy, Unreachable
from holdfast.orchestrator.kube.informer import Backoff

Document = dict[str, Any]
RETRY_MIN_S = 0.5
RETRY_MAX_S = 10.0


class Gone(HoldfastError):
    """The object was deleted while somebody looked at it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"job {name}: was deleted from the cluster meanwhile")


async def follow(
    cluster: KubeClient,
    document: Document,
    note: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Document]:
    """The job's object, now and whenever it changes. Raises Gone when it is deleted, also when
    another one has taken its name."""
    metadata = document["metadata"]
    namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
    pauses = Backoff(RETRY_MIN_S, RETRY_MAX_S)
    told = False
    while True:
        try:
            seen = await cluster.find(JOBS, namespace, name)
            if seen is None or seen["metadata"]["uid"] != uid:
                raise Gone(name)
            if told:
                note("the API server answers again")
                told = False
            yield seen
            version = seen["metadata"]["resourceVersion"]
            async for kind, changed in cluster.watch(
                JOBS, version, namespace, fields=f"metadata.name={name}"
            ):
                pauses.reset()
                if kind == "DELETED" or changed["metadata"].get("uid", uid) != uid:
                    raise Gone(name)
                if kind != "BOOKMARK":
                    yield changed
        except Expired:
            continue
        except (Unreachable, TooBusy) as error:
            if not told:
                note(f"{error} Training does not depend on it; trying again")
                told = True
            await asyncio.sleep(pauses.next_s())
