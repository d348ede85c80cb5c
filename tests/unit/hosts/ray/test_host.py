"""RayHost, with cluster and store in memory: watchers, and the end of a job that never began."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
from holdfast.orchestrator.backends.ray import actors, kv, names, ray_nodes
from holdfast.orchestrator.cli.display import SilentDisplay
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.cli.targets.ray.job import RayTransport
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import RayHost, RayHostTiming
from holdfast.orchestrator.journal.chunk_journal import ChunkJournal
from holdfast.orchestrator.protocol.certificate import make_keys
from holdfast.orchestrator.runtime.control_api import WATCH_INTERVAL_S
from tests.documents import job_document
from tests.unit.backends.ray.fake_cluster import FakeCluster

from .memory_store import MemoryStore

BOUND_S = 30.0


class UnlistableFileSystem(MemoryFileSystem):
    """A bucket that may be written and not listed."""

    protocol = "unlistable"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError(13, "no right to list")


fsspec.register_implementation("unlistable", UnlistableFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """A host adds handlers to the logger; they are removed."""
    log = logging.getLogger("holdfast")
    before = list(log.handlers)
    yield
    log.handlers[:] = before


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def make_order(directory: Path, **spec: Any) -> ControllerOrder:
    job = job_from_mapping(job_document("job", {"entrypoint": {"script": "train.py"}} | spec))
    made = make_keys(names.tls("id"))
    return ControllerOrder(
        document=job_to_mapping(job), job="job", job_id="id", spec_directory=str(directory),
        token=made.token, certificate=made.certificate, key=made.key,
    )  # fmt: skip


MakeHost = Callable[..., RayHost]


@pytest.fixture
def make_host(tmp_path: Path, store: MemoryStore) -> MakeHost:
    return functools.partial(
        RayHost, store=store, logs=tmp_path, groups=FakeCluster(a=1).of("job"), drain_source=dict
    )


# -- watchers ----------------------------------------------------------------------------------
Serving = Callable[[RayHostTiming], RayHost]


@pytest.fixture
def serving(make_host: MakeHost, tmp_path: Path) -> Serving:
    """A host whose job has begun, and where nothing happens."""

    def serving_host(timing: RayHostTiming) -> RayHost:
        host = make_host(make_order(tmp_path), timing=timing)
        host._serving.set()
        return host

    return serving_host


async def test_a_watcher_is_answered_within_a_bound_when_nothing_happens(serving: Serving) -> None:
    default = RayHostTiming()
    assert default.watch_s + default.progress_s < actors.ANSWER_S
    host = serving(RayHostTiming(watch_s=0.01, progress_s=WATCH_INTERVAL_S))
    async with asyncio.timeout(BOUND_S):
        seen = (await host.watch(-1))["seen"]
        answer = await host.watch(seen)
    assert answer["seen"] == seen and answer["view"]["name"] == "job"


async def test_a_watcher_gets_events_at_once_and_progress_later(serving: Serving) -> None:
    host = serving(RayHostTiming(progress_s=1e6))
    async with asyncio.timeout(BOUND_S):
        watching = asyncio.create_task(host.watch((await host.watch(-1))["seen"]))
        host.runtime.changes.notify()
        assert not (await asyncio.wait([watching], timeout=2 * WATCH_INTERVAL_S))[0]
        host.runtime.events.notify()
        await watching


async def test_a_watcher_of_an_earlier_controller_does_not_wait_for_its_count(
    serving: Serving,
) -> None:
    host = serving(RayHostTiming(watch_s=1e6))
    async with asyncio.timeout(BOUND_S):
        await host.watch(("an earlier controller", 10**6, 10**6))


async def test_the_view_is_published_among_rays_logs_until_the_job_has_ended(
    make_host: MakeHost, tmp_path: Path
) -> None:
    """The view is for commands over http://."""
    host = make_host(
        make_order(tmp_path),
        logs=tmp_path / "holdfast-job-id",
        timing=RayHostTiming(view_file_s=0.01, view_refresh_s=0.01),
    )
    file = tmp_path / names.view_file("job")
    publishing = asyncio.create_task(host._publish())
    async with asyncio.timeout(BOUND_S):
        while not file.exists():
            await asyncio.sleep(0.01)
        published = json.loads(file.read_text())
        assert published["pid"] == os.getpid() and published["view"]["name"] == "job"
        publishing.cancel()
        await asyncio.wait([publishing])
        await host._finish(host.runtime.view(live=False))
    assert not file.exists()


# -- a job that is refused ---------------------------------------------------------------------
@pytest.fixture
def order(tmp_path: Path) -> ControllerOrder:
    return make_order(tmp_path, checkpoint={"path": "unlistable://bucket/job"})


def refusal(order: ControllerOrder, store: MemoryStore) -> HoldfastError:
    """Error of the command that waits for the job."""
    job = RayTransport(order, lambda *words: " ".join(words), store=store)
    with pytest.raises(HoldfastError) as raised:
        job.watch(SilentDisplay(stderr()))
    return raised.value


def test_storage_that_cannot_be_listed_fails_the_job(
    order: ControllerOrder, store: MemoryStore, make_host: MakeHost
) -> None:
    asyncio.run(make_host(order).run())
    error = refusal(order, store)
    assert "cannot be read (no right to list)" in str(error)
    assert error.exit_code == 1


def test_a_mistake_in_the_spec_is_a_user_error(
    order: ControllerOrder, store: MemoryStore, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_: 1 / 0)
    asyncio.run(make_host(order).run())
    assert refusal(order, store).exit_code == UserError.exit_code


def test_a_refusal_without_an_exit_code_is_a_user_error(
    order: ControllerOrder, store: MemoryStore, make_host: MakeHost
) -> None:
    """The record without these fields."""
    asyncio.run(make_host(order).run())
    record = json.loads(store.get(kv.ENDED) or b"")
    del record["exit_code"]
    store.put(kv.ENDED, json.dumps(record).encode())
    assert refusal(order, store).exit_code == UserError.exit_code


def test_a_journal_that_cannot_be_written_refuses_no_job(
    order: ControllerOrder, store: MemoryStore, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_journal: ChunkJournal, *, durable: bool = True) -> None:
        raise JournalError("the head does not answer")

    monkeypatch.setattr(ChunkJournal, "commit", fail)
    monkeypatch.setattr(UnlistableFileSystem, "ls", MemoryFileSystem.ls)
    monkeypatch.setattr(ray_nodes, "own_node", lambda: {"address": "127.0.0.1"})
    with pytest.raises(JournalError):
        asyncio.run(make_host(order).run())
    assert not store.exists(kv.ENDED)
