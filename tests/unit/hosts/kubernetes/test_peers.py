"""A leader that cannot reach the API server, and whether another replica leads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from holdfast.orchestrator.hosts.kubernetes.peers import no_other_leads
from holdfast.orchestrator.kube.leader_election import LeaderElection, LeaseName
from holdfast.orchestrator.kube.names import Document
from tests.unit.hosts.kubernetes.operator_harness import BUSY, StatefulFakeApi
from tests.unit.kube.fake_api import BOUND_S, cluster_of, eventually, status

LOCAL = "127.0.0.1"
NO_ADDRESSES: frozenset[str] = frozenset()


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


def test_a_replica_that_refuses_connections_does_not_lead() -> None:
    endpoint = f"{LOCAL}:{free_port()}"
    assert asyncio.run(no_other_leads(endpoint, NO_ADDRESSES))


def test_a_replica_that_listens_for_agents_leads() -> None:
    with socket.create_server((LOCAL, 0)) as server:
        endpoint = f"{LOCAL}:{server.getsockname()[1]}"
        assert not asyncio.run(no_other_leads(endpoint, NO_ADDRESSES))
        assert asyncio.run(no_other_leads(endpoint, frozenset({LOCAL}))), "that is this one"


def test_without_an_answer_another_replica_may_lead() -> None:
    assert not asyncio.run(no_other_leads("no-such-host.invalid:7077", NO_ADDRESSES))


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


@pytest.mark.parametrize(("others", "keeps"), [(yes, True), (no, False), (None, False)])
async def test_a_leader_goes_on_without_the_api_server_while_no_other_leads(
    others: Callable[[], Awaitable[bool]] | None, keeps: bool
) -> None:
    api = StatefulFakeApi()
    async with cluster_of(api) as cluster:
        leader = LeaderElection(cluster, LeaseName("system", "lease"), "one", lease_s=1.0)
        await leader.acquire()
        api.reject = lambda request: BUSY
        before = len(api.requests)
        keeping = asyncio.create_task(leader.keep(others))
        if keeps:
            await eventually(lambda: len(api.requests) > before + 8, "many attempts")
            assert not keeping.done() and leader.leading
            api.reject = lambda request: None
            renewed = current(api)["renewTime"]
            await eventually(lambda: current(api)["renewTime"] != renewed, "a renewal")
            assert leader.leading
            current(api)["holderIdentity"] = "two"
            current(api)["leaseDurationSeconds"] = 600
            changed = status(409, "Conflict", "the object has been modified")
            api.reject = lambda request: changed if request[0] == "PUT" else None
        async with asyncio.timeout(BOUND_S):
            reason = await keeping
        assert ("two holds the lease" in reason) == keeps
        assert not leader.leading


PATH = "/apis/coordination.k8s.io/v1/namespaces/system/leases/lease"


def current(api: StatefulFakeApi) -> Document:
    return api.objects[PATH]["spec"]
