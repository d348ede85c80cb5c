"""Writes and end of the status writer; tests/e2e/kubernetes/test_operator.py reads the texts."""

from __future__ import annotations

import asyncio

import pytest
from kubernetes.aio import client as library

from holdfast.orchestrator.hosts.kubernetes.status_writer import StatusWriter
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import JOBS
from holdfast.orchestrator.kube.names import Owner
from tests.unit.kube.fake_api import cluster_of

from .operator_harness import StatefulFakeApi, training_job

BOUND_S = 20


async def test_the_writer_ends_when_it_is_cancelled_together_with_an_urgent_change() -> None:
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


@pytest.mark.parametrize(("state", "is_seen"), [("running", True), ("suspended", False)])
async def test_the_status_of_a_job_with_workers_has_the_time_at_which_it_held(
    state: str, is_seen: bool
) -> None:
    api = StatefulFakeApi()
    path = JOBS.path("team", "llm")
    api.keep(path, training_job("llm"))
    async with cluster_of(api) as cluster:
        owner, problems = Owner("team", "llm", "uid"), list[str]()
        status = {"state": state}
        writer = StatusWriter(cluster, owner, {}, lambda before: {**status}, problems.append)
        for _again in range(2):
            await writer.write()
            assert [verb for verb, _path in api.requests].count("PATCH") == 1, "nothing changed"
        assert ("seen" in api.objects[path]["status"]) == is_seen
