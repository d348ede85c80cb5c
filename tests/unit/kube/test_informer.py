"""The local copy of all objects of one kind: what it makes of a watch that ends, breaks or is too
old, and of changes that it never saw.

Owns: these tests, against a small HTTP server that says what an API server would.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.orchestrator.kube.errors import PODS
from holdfast.orchestrator.kube.informer import Informer
from tests.unit.kube.fake_api import FakeApi, cluster_of, eventually, status

Document = dict[str, Any]
Told = list[tuple[str, str, str]]
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
async def mirrored(api: FakeApi) -> AsyncIterator[tuple[Informer, Told]]:
    """A mirror that has listed, and what it tells from then on."""
    told: Told = []

    def on_change(change: str, document: Document) -> None:
        metadata = document["metadata"]
        told.append((change, metadata["name"], metadata["uid"]))

    async with cluster_of(api) as cluster:
        mirror = Informer(cluster, PODS, on_change)
        running = asyncio.create_task(mirror.run())
        try:
            await eventually(mirror.synced.is_set, "the first list")
            told.clear()
            yield mirror, told
        finally:
            running.cancel()
            await asyncio.wait([running])


def test_a_watch_that_is_too_old_is_followed_by_a_new_list_that_makes_up_for_what_was_missed() -> (
    None
):
    async def story() -> None:
        api = FakeApi(listed=[thing("kept", 1), thing("changed", 2), thing("lost", 3)])
        async with mirrored(api) as (mirror, told):
            watch = await api.next_watch()
            api.listed, api.version = [thing("kept", 1), thing("changed", 9), thing("new", 8)], "9"
            watch.tell("ERROR", status(410, "Expired", "too old resource version"))
            assert (await api.next_watch()).version == "9"
            assert told == [
                ("DELETED", "lost", "uid-lost"),
                ("MODIFIED", "changed", "uid-changed"),
                ("ADDED", "new", "uid-new"),
            ]
            assert {name for _namespace, name in mirror.objects} == {"kept", "changed", "new"}
            assert api.num_lists == 2 and mirror.problem == ""

    asyncio.run(story())


def test_a_watch_that_is_refused_as_too_old_is_followed_by_a_new_list() -> None:
    async def story() -> None:
        api = FakeApi(listed=[thing("only", 1)], version="5")
        async with mirrored(api) as (_mirror, told):
            watch = await api.next_watch()
            api.refusals.append(status(410, "Expired", "too old resource version: 5 (7)"))
            api.listed, api.version = [], "7"
            watch.end()
            assert (await api.next_watch()).version == "7"
            assert told == [("DELETED", "only", "uid-only")]

    asyncio.run(story())


def test_a_watch_that_ends_or_breaks_off_goes_on_where_it_was_without_a_list() -> None:
    async def story() -> None:
        api = FakeApi(version="1")
        async with mirrored(api) as (mirror, told):
            first = await api.next_watch()
            assert first.version == "1"
            first.tell("ADDED", thing("one", 4))
            first.end()
            second = await api.next_watch()
            assert second.version == "4"
            second.tell("ERROR", status(500, "InternalError", "etcd has no leader"))
            third = await api.next_watch()
            assert third.version == "4"
            third.tell("DELETED", thing("one", 6))
            await eventually(lambda: len(told) == 2, "the deletion")
            assert told == [("ADDED", "one", "uid-one"), ("DELETED", "one", "uid-one")]
            assert mirror.objects == {} and api.num_lists == 1

    asyncio.run(story())


def test_a_bookmark_is_where_the_next_watch_begins_and_no_change() -> None:
    async def story() -> None:
        api = FakeApi(listed=[thing("calm", 1)], version="1")
        async with mirrored(api) as (mirror, told):
            watch = await api.next_watch()
            watch.tell("BOOKMARK", {"metadata": {"resourceVersion": "7000"}})
            watch.end()
            assert (await api.next_watch()).version == "7000"
            assert told == [] and len(mirror.objects) == 1

    asyncio.run(story())


def test_another_object_of_the_same_name_is_an_end_and_a_beginning() -> None:
    async def story() -> None:
        api = FakeApi(listed=[thing("twice", 1, "first")])
        async with mirrored(api) as (_mirror, told):
            watch = await api.next_watch()
            watch.tell("MODIFIED", thing("twice", 5, "second"))
            await eventually(lambda: len(told) == 2, "both")
            assert told == [("DELETED", "twice", "first"), ("ADDED", "twice", "second")]
            told.clear()
            api.listed = [thing("twice", 9, "third")]
            watch.tell("ERROR", status(410, "Expired"))
            await api.next_watch()
            assert told == [("DELETED", "twice", "second"), ("ADDED", "twice", "third")]

    asyncio.run(story())


def test_what_is_heard_twice_is_told_once() -> None:
    async def story() -> None:
        api = FakeApi(listed=[thing("calm", 3)])
        async with mirrored(api) as (_mirror, told):
            watch = await api.next_watch()
            watch.tell("ADDED", thing("calm", 3))
            watch.tell("MODIFIED", thing("calm", 4))
            await eventually(lambda: bool(told), "the change")
            assert told == [("MODIFIED", "calm", "uid-calm")]

    asyncio.run(story())


def test_why_nothing_is_heard_is_said_until_a_watch_stands_again() -> None:
    async def story() -> None:
        api = FakeApi()
        async with mirrored(api) as (mirror, _told):
            watch = await api.next_watch()
            message = 'pods is forbidden: User "ann" cannot watch resource "pods" in API group ""'
            api.refusals.append(status(403, "Forbidden", message))
            watch.end()
            await eventually(lambda: "missing right: watch pods" in mirror.problem, "the right")
            await api.next_watch()  # nothing has changed, so it hears nothing for a minute
            await eventually(lambda: mirror.problem == "", "all to be well")
            assert api.num_lists == 1

    asyncio.run(story())
