"""The output of a pod's training container, line by line.

Following resumes after the last line when the API server ends the stream, which it does after some
minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from .client import KubeClient
from .errors import PODS, ApiError, Invalid, NotFound, TooBusy, Unreachable
from .informer import Backoff

ENDED = ("Succeeded", "Failed")
RETRY_MIN_S = 0.5
RETRY_MAX_S = 10.0


async def lines(
    cluster: KubeClient, namespace: str, pod: str, *, follow: bool, only_new: bool = False
) -> AsyncIterator[bytes]:
    """All lines that the kubelet has, unless `only_new`, and, with `follow`, new ones until the
    container ends.

    Raises Invalid when the container has not started yet, NotFound when the pod is gone.
    """
    last = b""
    backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
    while True:
        try:
            stream = await cluster.log(
                namespace, pod, follow=follow, since=last.decode(), only_new=only_new and not last
            )
            async for line in _lines(stream):
                time, _space, text = line.partition(b" ")
                # `since` has a resolution of one second, so lines come a second time.
                if time > last:
                    last = time
                    backoff.reset()
                    yield text
            if not follow or await _has_ended(cluster, namespace, pod):
                return
        except (Unreachable, TooBusy, aiohttp.ClientError, TimeoutError, OSError) as error:
            if not follow:
                if isinstance(error, ApiError):
                    raise
                why = error or type(error).__name__
                raise ApiError(f"the log stream of pod {pod} ended early ({why})") from None
        except (Invalid, NotFound):
            if last:
                return
            raise
        await asyncio.sleep(backoff.next_s())


async def _lines(stream: Any) -> AsyncIterator[bytes]:
    rest = b""
    async for part in stream.iter_any():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def _has_ended(cluster: KubeClient, namespace: str, pod: str) -> bool:
    document = await cluster.find(PODS, namespace, pod)
    return document is None or document.get("status", {}).get("phase") in ENDED
