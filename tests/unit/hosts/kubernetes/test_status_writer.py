"""Cancellation of the status writer. What it writes is tested against a real API server in
tests/e2e/kubernetes/test_operator.py.
"""

from __future__ import annotations

import asyncio

from kubernetes.aio import client as library

from holdfast.orchestrator.hosts.kubernetes.status_writer import StatusWriter
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.names import Owner

BOUND_S = 20


def test_the_writer_ends_when_it_is_cancelled_together_with_an_urgent_change() -> None:
    async def scenario() -> None:
        async with KubeClient(library.ApiClient(library.Configuration()), "default") as cluster:
            owner, problems = Owner("default", "x", "uid"), list[str]()
            writer = StatusWriter(cluster, owner, {}, lambda before: {}, problems.append)
            writer._written_at = asyncio.get_running_loop().time()
            running = asyncio.create_task(writer.run())
            writer.mark_dirty()
            for _ in range(5):  # the writer waits for its interval or an urgent change
                await asyncio.sleep(0)
            writer.mark_dirty(urgent=True)
            await asyncio.sleep(0)
            running.cancel()
            done, _pending = await asyncio.wait([running], timeout=BOUND_S)
            assert running in done and running.cancelled()

    asyncio.run(scenario())
