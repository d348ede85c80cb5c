"""What the Ray backend does while the head does not answer: no node is lost track of, and nothing
else waits for it. The cluster is a fake one; no actor is started here."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
from holdfast.orchestrator.backends.ray import (
    actor_calls,
    actors,
    cluster,
    drains,
    names,
    placement_groups,
)
from holdfast.orchestrator.backends.ray.backend import RayBackend
from holdfast.orchestrator.backends.ray.drains import Drains, RayNodeLookup
from holdfast.orchestrator.backends.ray.kv import JobKeyValueStore
from holdfast.orchestrator.backends.ray.node_registry import RayNodeRegistry
from holdfast.orchestrator.backends.ray.placement_groups import PlacementGroupHandle, RayGroups
from holdfast.orchestrator.hosts.ray import host as ray_host
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import RayHost
from holdfast.orchestrator.protocol.certificate import TlsKeyPair as Secrets
from holdfast.orchestrator.protocol.certificate import make_keys

from .fake_cluster import FakeCluster

JOB = job_from_mapping(
    {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job"},
        "spec": {"entrypoint": {"script": "train.py"}, "nodes": {"min": 1, "max": 4}},
    }
)
BOUND_S = 30.0


class LostKeys(JobKeyValueStore):
    """A store that nobody can write to, and that takes its time to say so for the second time."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self.writes = itertools.count(1)
        self.written_again, self.said = threading.Event(), threading.Event()

    def put(self, key: str, value: bytes) -> None:
        if next(self.writes) == 2:
            self.written_again.set()
            self.said.wait(BOUND_S)
        raise RuntimeError("the head does not answer")


class Kept(JobKeyValueStore):
    """A store that takes everything."""

    def put(self, key: str, value: bytes) -> None:
        return


class Never:
    """A placement group without a place, as Ray's handle of it blocks."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self.placed = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.waited_for.set()
        return self.placed.wait(timeout_s)


def test_a_node_that_could_not_be_written_down_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCluster(a=1)
    monkeypatch.setattr(placement_groups, "RayGroups", lambda job, _bundle: fake.of(job))

    async def scenario() -> None:
        keys = LostKeys("job")
        backend = RayBackend(JOB, "id", keys, Secrets("token", b"", b""))
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(RuntimeError, match="the head does not answer"):
                await backend.request_nodes(1, ())
            # Its group has a place: the node is tried once more.
            assert await asyncio.to_thread(keys.written_again.wait, BOUND_S)
            assert await backend.list_nodes() == ()
            keys.said.set()
            await backend.close(release=False)
        assert await backend.list_nodes() == ()

    asyncio.run(scenario())


def test_the_places_of_nodes_that_ended_without_a_controller_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller ended between the end of the agents and that of their placement groups."""
    fake = FakeCluster(a=1, b=1)
    nodes = {f"node-{number}": (f"job/node-{number}", 0) for number in range(2)}
    known = RayNodeRegistry(
        next_number=2, nodes=nodes, groups=dict.fromkeys(["job/node-0", "job/node-1"], 1)
    )

    class Left(Kept):
        def get(self, key: str) -> bytes | None:
            return msgspec.json.encode(known)

    async def nothing(_drains: Drains) -> None: ...

    monkeypatch.setattr(placement_groups, "RayGroups", lambda job, _bundle: fake.of(job))
    monkeypatch.setattr(Drains, "watch", nothing)
    monkeypatch.setattr(actors, "find", lambda job, node: None)

    async def scenario() -> None:
        for node in nodes:
            fake.of("job").make(node, 1, frozenset())
        assert len(fake.groups) == 2
        backend = RayBackend(JOB, "id", Left("job"), Secrets("token", b"", b""))
        await backend.open(lambda gone: None)
        left = dict(fake.groups)
        await backend.close(release=False)
        assert not left

    asyncio.run(scenario())


def test_the_name_of_a_node_that_has_ended_is_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when its group is still there at this moment."""
    fake = FakeCluster(a=1)
    monkeypatch.setattr(placement_groups, "RayGroups", lambda job, _bundle: fake.of(job))

    async def bring_up(_self: RayBackend, _node: str) -> None:
        return

    monkeypatch.setattr(RayBackend, "_bring_up", bring_up)

    async def scenario() -> None:
        backend = RayBackend(JOB, "id", Kept("job"), Secrets("token", b"", b""))
        async with asyncio.timeout(BOUND_S):
            assert await backend.request_nodes(1, ()) == ("node-0",)
            group = backend._gang_of("node-0")
            assert group is not None
            backend._forget("node-0")
            assert await backend._start([(group, 0)]) != ["node-0"]
            await backend.close(release=False)

    asyncio.run(scenario())


def test_groups_without_a_place_leave_the_threads_to_others() -> None:
    handles = [Never() for _ in range(40)]  # more than asyncio's pool has threads anywhere

    async def scenario() -> None:
        maker = RayGroups("job", {"CPU": 1.0})
        waiting = [
            asyncio.create_task(maker.wait(PlacementGroupHandle(f"job/node-{number}", 1, handle)))
            for number, handle in enumerate(handles)
        ]
        try:
            async with asyncio.timeout(BOUND_S):
                while not all(handle.waited_for.is_set() for handle in handles):
                    await asyncio.sleep(0.01)
                assert await asyncio.to_thread(lambda: "at once") == "at once"
                assert not any(task.done() for task in waiting)
        finally:
            for handle in handles:
                handle.placed.set()
        await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_a_wait_that_the_head_breaks_off_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Never):
        fails = 2

        def wait(self, timeout_s: float) -> bool:
            if self.fails:
                self.fails -= 1
                raise RuntimeError("the head does not answer")
            return True

    monkeypatch.setattr(placement_groups, "PAUSE_S", 0.01)

    async def scenario() -> None:
        async with asyncio.timeout(BOUND_S):
            await RayGroups("job", {"CPU": 1.0}).wait(
                PlacementGroupHandle("job/node-0", 1, Broken())
            )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (names.agent("holdfast-a", "node-1"), names.controller("a-node-1")),
        (names.agent("a", "node-1"), names.controller("a-node-1")),
        (names.agent("a-node-1", "node-2"), names.agent("a", "node-1")),
    ],
)
def test_things_of_two_jobs_never_have_the_same_name(one: str, other: str) -> None:
    assert one != other


def test_what_belongs_to_a_job_is_told_by_its_name() -> None:
    assert names.belongs(names.controller("a"), "a")
    assert names.belongs(names.agent("a", "node-12"), "a")
    others: list[Callable[[], str]] = [
        lambda: names.controller("a-node-1"),
        lambda: names.agent("a-b", "node-1"),
        lambda: names.agent("a-node-1", "node-2"),
    ]
    assert not any(names.belongs(other(), "a") for other in others)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RayHost:
    """Of a job whose controller has begun, and where nothing happens."""
    monkeypatch.setattr(cluster, "log_directory", lambda job, job_id: tmp_path)
    made = make_keys(names.tls("id"))
    order = ControllerOrder(
        document=job_to_mapping(JOB), job="job", job_id="id", spec_directory=str(tmp_path),
        token=made.token, certificate=made.certificate, key=made.key,
    )  # fmt: skip
    host = RayHost(order)
    host._serving.set()
    return host


def test_a_watcher_of_a_job_in_which_nothing_happens_is_answered_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, host: RayHost
) -> None:
    assert ray_host.WATCH_S + ray_host.PROGRESS_INTERVAL_S < actor_calls.ANSWER_S
    monkeypatch.setattr(ray_host, "WATCH_S", 0.01)

    async def scenario() -> None:
        async with asyncio.timeout(BOUND_S):
            seen = (await host.watch(-1))["seen"]
            news = await host.watch(seen)
        assert news["seen"] == seen and news["view"]["name"] == "job"

    asyncio.run(scenario())


def test_a_watcher_is_told_of_events_at_once_and_of_progress_at_leisure(
    monkeypatch: pytest.MonkeyPatch, host: RayHost
) -> None:
    monkeypatch.setattr(ray_host, "PROGRESS_INTERVAL_S", 1e6)

    async def scenario() -> None:
        async with asyncio.timeout(BOUND_S):
            watching = asyncio.create_task(host.watch((await host.watch(-1))["seen"]))
            host.assembly.changes.tell()
            assert not (await asyncio.wait([watching], timeout=2 * ray_host.WATCH_INTERVAL_S))[0]
            host.assembly.events.tell()
            await watching

    asyncio.run(scenario())


def test_who_has_watched_an_earlier_controller_does_not_wait_for_its_count(
    monkeypatch: pytest.MonkeyPatch, host: RayHost
) -> None:
    monkeypatch.setattr(ray_host, "WATCH_S", 1e6)

    async def scenario() -> None:
        async with asyncio.timeout(BOUND_S):
            await host.watch(("an earlier one", 10**6, 10**6))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "first", [RuntimeError("the head does not answer"), None], ids=["no-head", "made-way"]
)
def test_a_call_without_an_answer_is_no_end_of_a_node(first: Exception | None) -> None:
    """The head does not answer, or the call has made way for those of other controllers."""

    class Remote:
        answers: ClassVar[list[Any]] = [first, "was killed by SIGKILL"]

        async def remote(self) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Actor:
        wait_for_end = Remote()

    async def scenario() -> None:
        async with asyncio.timeout(BOUND_S):
            told = await actors.until_ended(Actor(), 0.01)
        assert told == "its agent was killed by SIGKILL"

    asyncio.run(scenario())


def test_a_head_that_does_not_answer_does_not_end_the_watch_for_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [RuntimeError("the head does not answer"), {"there": 0}]

    def draining() -> dict[str, int]:
        answer: Any = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    monkeypatch.setattr(drains, "draining", draining)
    monkeypatch.setattr(drains, "LOOK_EVERY_S", 0.01)

    async def scenario() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        places = RayNodeLookup({"node-0": "there", "node-1": "elsewhere"}, {})
        watch = Drains(places, lambda node, detail, grace_s: told.put_nowait(node)).watch()
        task = asyncio.create_task(watch)
        async with asyncio.timeout(BOUND_S):
            assert await told.get() == "node-0"
        task.cancel()
        assert told.empty()

    asyncio.run(scenario())
