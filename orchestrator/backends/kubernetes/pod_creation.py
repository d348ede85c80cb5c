"""Making the pods of one request: which refusals are answered by asking again, and what there is
when one of them lasts.

Owns: that difference. Must not: delete pods or know their job; what is kept of a request that was
refused in part is the backend's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import PODS, ApiError, Conflict, TooBusy, Unreachable
from holdfast.orchestrator.kube.informer import Backoff

TRY_AGAIN_S = 15.0
"""For so long a pod is asked for again after what may only have come at the wrong moment: of a
thousand that are made at once the API server puts some off."""
PAUSE_MIN_S = 0.25
PAUSE_MAX_S = 4.0


@dataclass
class CreatedPods:
    """What has come of a request."""

    there: list[str] = field(default_factory=list)
    """Pods that were made."""
    unknown: list[str] = field(default_factory=list)
    """Pods that may have been made: the answer did not come."""
    refusal: ApiError | None = None
    """The first that lasts. Who had not been asked for by then was not asked for any more: the pods
    of a request are alike."""


async def make(
    cluster: KubeClient, namespace: str, pods: Sequence[Document], slots: asyncio.Semaphore
) -> CreatedPods:
    """`slots`: how many may be under way; one that waits for its next try keeps its slot, so that a
    server with too much to do is not asked by all the others. Raises nothing of the API server."""
    made = CreatedPods()

    async def one(pod: Document) -> None:
        async with slots:
            if made.refusal is not None:
                return
            await _make_one(cluster, namespace, pod, made)

    await asyncio.gather(*map(one, pods))
    return made


async def _make_one(cluster: KubeClient, namespace: str, pod: Document, made: CreatedPods) -> None:
    name, pauses, in_doubt = pod["metadata"]["name"], Backoff(PAUSE_MIN_S, PAUSE_MAX_S), False
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + TRY_AGAIN_S
    while True:
        try:
            await cluster.create(PODS, namespace, pod)
        except ApiError as error:
            if in_doubt and isinstance(error, Conflict) and error.exists:
                break
            in_doubt = in_doubt or isinstance(error, Unreachable | TooBusy)
            if loop.time() > give_up_s or made.refusal is not None or not passes(error):
                made.refusal = made.refusal or error
                made.unknown += [name] if in_doubt else []
                return
            await asyncio.sleep(pauses.next_s())
        else:
            break
    made.there.append(name)


def passes(error: ApiError) -> bool:
    """The same may be granted in a moment: the server was busy or away, or another pod was counted
    against the quota at the same time (409, and not because the name is taken)."""
    if isinstance(error, Conflict):
        return not error.exists
    return isinstance(error, TooBusy | Unreachable)
