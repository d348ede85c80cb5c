"""The writer of a job's status: it ends when it is told to, whatever happens at that moment.

Owns: these tests. What is written is tested against a real API server
(tests/e2e/kubernetes/test_operator.py).
"""

from __future__ import annotations

import asyncio

from kubernetes.aio import client as library

from holdfast.orchestrator.hosts.kubernetes.status_writer import StatusWriter
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.names import Owner

BOUND_S = 20


def test_a_reporter_ends_when_it_is_cancelled_in_the_moment_of_urgent_news() -> None:
    async def story() -> None:
        async with KubeClient(library.ApiClient(library.Configuration()), "default") as cluster:
            owner, said = Owner("default", "x", "uid"), list[str]()
            reporter = StatusWriter(cluster, owner, {}, lambda before: {}, said.append)
            reporter._written_at = asyncio.get_running_loop().time()
            running = asyncio.create_task(reporter.run())
            reporter.dirty()
            for _ in range(5):  # it has seen the news, and waits for its interval or urgent ones
                await asyncio.sleep(0)
            reporter.dirty(urgent=True)
            await asyncio.sleep(0)
            running.cancel()
            done, _pending = await asyncio.wait([running], timeout=BOUND_S)
            assert running in done and running.cancelled()

    asyncio.run(story())
