"""RayBackend on a fake cluster without actors: no node is lost while the head is silent."""

from __future__ import annotations

import asyncio
import itertools
import threading

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray.backend import RayBackend
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore, RayNodeRegistry
from holdfast.orchestrator.protocol.certificate import TlsKeyPair
from tests.documents import job_document

from .fake_cluster import FakeCluster

JOB = job_from_mapping(
    job_document("job", {"entrypoint": {"script": "train.py"}, "nodes": {"min": 1, "max": 4}})
)
BOUND_S = 30.0


class FailingStore(JobKeyValueStore):
    """Every write fails; the second one blocks before."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self._writes = itertools.count(1)
        self.second_write, self.unblock = threading.Event(), threading.Event()

    def put(self, key: str, value: bytes) -> None:
        if next(self._writes) == 2:
            self.second_write.set()
            self.unblock.wait(BOUND_S)
        raise RuntimeError("the head does not answer")


class AcceptingStore(JobKeyValueStore):
    def put(self, key: str, value: bytes) -> None:
        return


def backend(store: JobKeyValueStore, cluster: FakeCluster) -> RayBackend:
    return RayBackend(
        JOB, "id", store, TlsKeyPair("token", b"", b""), groups=cluster.of("job"),
        find_agent=lambda job, node: None, drain_source=dict,
    )  # fmt: skip


async def test_a_node_that_is_not_in_the_store_does_not_exist() -> None:
    store = FailingStore("job")
    ray = backend(store, FakeCluster(a=1))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(RuntimeError, match="the head does not answer"):
            await ray.request_nodes(1, ())
        # Its group has a place: the backend tries to start the node once more.
        assert await asyncio.to_thread(store.second_write.wait, BOUND_S)
        assert await ray.list_nodes() == ()
        store.unblock.set()
        await ray.close(release=False)
    assert await ray.list_nodes() == ()


async def test_groups_of_nodes_that_ended_without_a_controller_are_removed() -> None:
    """A controller ended between the end of the agents and that of their placement groups."""
    cluster = FakeCluster(a=1, b=1)
    nodes = {f"node-{number}": (f"job/node-{number}", 0) for number in range(2)}
    groups = dict.fromkeys(["job/node-0", "job/node-1"], 1)
    registry = RayNodeRegistry(next_number=2, nodes=nodes, groups=groups)

    class EarlierStore(AcceptingStore):
        def get(self, key: str) -> bytes | None:
            return msgspec.json.encode(registry)

    for node in nodes:
        cluster.of("job").make(node, 1, frozenset())
    assert len(cluster.groups) == 2
    ray = backend(EarlierStore("job"), cluster)
    await ray.open(lambda gone: None)
    left = dict(cluster.groups)
    await ray.close(release=False)
    assert not left


async def test_the_name_of_an_ended_node_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays in use while its group still exists, too."""

    async def start_actor(_self: RayBackend, _node: str) -> None:
        return

    monkeypatch.setattr(RayBackend, "_start_actor", start_actor)
    ray = backend(AcceptingStore("job"), FakeCluster(a=1))
    async with asyncio.timeout(BOUND_S):
        assert await ray.request_nodes(1, ()) == ("node-0",)
        group = ray._group_of("node-0")
        assert group is not None
        ray._forget("node-0")
        assert await ray._start([(group, 0)]) != ["node-0"]
        await ray.close(release=False)
