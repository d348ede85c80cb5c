"""The informer against a fake API server: watches that end, break or expire, and missed changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.orchestrator.kube.errors import PODS
from holdfast.orchestrator.kube.informer import Informer
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually, status

Document = dict[str, Any]
Changes = list[tuple[str, str, str]]
"""(change, name, uid)"""


def thing(name: str, version: int, uid: str = "") -> Document:
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
        }
    }


@asynccontextmanager
async def watched(api: FakeApi) -> AsyncIterator[tuple[Informer, Changes]]:
    """An informer after its first list, and the later changes."""
    changes: Changes = []

    def on_change(change: str, document: Document) -> None:
        metadata = document["metadata"]
        changes.append((change, metadata["name"], metadata["uid"]))

    async with cluster_of(api) as cluster:
        informer = Informer(cluster, PODS, on_change)
        running = asyncio.create_task(informer.run())
        try:
            await eventually(informer.synced.is_set, "the first list")
            changes.clear()
            yield informer, changes
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_watch_that_expires_is_followed_by_a_list_with_the_missed_changes() -> None:
    api = FakeApi(listed=[thing("kept", 1), thing("changed", 2), thing("lost", 3)])
    async with watched(api) as (informer, changes):
        watch = await api.next_watch()
        api.listed, api.version = [thing("kept", 1), thing("changed", 9), thing("new", 8)], "9"
        watch.send("ERROR", status(410, "Expired", "too old resource version"))
        assert (await api.next_watch()).version == "9"
        assert changes == [
            ("DELETED", "lost", "uid-lost"),
            ("MODIFIED", "changed", "uid-changed"),
            ("ADDED", "new", "uid-new"),
        ]
        assert {name for _namespace, name in informer.objects} == {"kept", "changed", "new"}
        assert api.num_lists == 2 and informer.problem == ""


async def test_a_watch_that_is_refused_as_expired_is_followed_by_a_list() -> None:
    api = FakeApi(listed=[thing("only", 1)], version="5")
    async with watched(api) as (_informer, changes):
        watch = await api.next_watch()
        api.refusals.append(status(410, "Expired", "too old resource version: 5 (7)"))
        api.listed, api.version = [], "7"
        watch.end()
        assert (await api.next_watch()).version == "7"
        assert changes == [("DELETED", "only", "uid-only")]


async def test_a_watch_that_ends_or_fails_resumes_without_a_list() -> None:
    api = FakeApi(version="1")
    async with watched(api) as (informer, changes):
        first = await api.next_watch()
        assert first.version == "1"
        first.send("ADDED", thing("one", 4))
        first.end()
        second = await api.next_watch()
        assert second.version == "4"
        second.send("ERROR", status(500, "InternalError", "etcd has no leader"))
        third = await api.next_watch()
        assert third.version == "4"
        third.send("DELETED", thing("one", 6))
        await eventually(lambda: len(changes) == 2, "the deletion")
        assert changes == [("ADDED", "one", "uid-one"), ("DELETED", "one", "uid-one")]
        assert informer.objects == {} and api.num_lists == 1


async def test_a_bookmark_moves_the_next_watch_and_is_no_change() -> None:
    api = FakeApi(listed=[thing("calm", 1)], version="1")
    async with watched(api) as (informer, changes):
        watch = await api.next_watch()
        watch.send("BOOKMARK", {"metadata": {"resourceVersion": "7000"}})
        watch.end()
        assert (await api.next_watch()).version == "7000"
        assert changes == [] and len(informer.objects) == 1


async def test_a_new_object_of_the_same_name_is_a_deletion_and_an_addition() -> None:
    api = FakeApi(listed=[thing("twice", 1, "first")])
    async with watched(api) as (_informer, changes):
        watch = await api.next_watch()
        watch.send("MODIFIED", thing("twice", 5, "second"))
        await eventually(lambda: len(changes) == 2, "both")
        assert changes == [("DELETED", "twice", "first"), ("ADDED", "twice", "second")]
        changes.clear()
        api.listed = [thing("twice", 9, "third")]
        watch.send("ERROR", status(410, "Expired"))
        await api.next_watch()
        assert changes == [("DELETED", "twice", "second"), ("ADDED", "twice", "third")]


async def test_an_event_that_comes_twice_is_one_change() -> None:
    api = FakeApi(listed=[thing("calm", 3)])
    async with watched(api) as (_informer, changes):
        watch = await api.next_watch()
        watch.send("ADDED", thing("calm", 3))
        watch.send("MODIFIED", thing("calm", 4))
        await eventually(lambda: bool(changes), "the change")
        assert changes == [("MODIFIED", "calm", "uid-calm")]


async def test_the_problem_is_reported_until_a_watch_works_again() -> None:
    api = FakeApi()
    async with watched(api) as (informer, _changes):
        watch = await api.next_watch()
        message = 'pods is forbidden: User "ann" cannot watch resource "pods" in API group ""'
        api.refusals.append(status(403, "Forbidden", message))
        watch.end()
        await eventually(lambda: "missing right: watch pods" in informer.problem, "the right")
        await api.next_watch()  # nothing has changed, so no event comes for a minute
        await eventually(lambda: informer.problem == "", "all to be well")
        assert api.num_lists == 1
