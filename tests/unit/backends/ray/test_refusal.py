"""A job that never began is refused for good, with what is wrong; its controller is not started
anew for ever. The cluster and its store are in memory."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
from holdfast.orchestrator.backends.ray import cluster, names, placement_groups
from holdfast.orchestrator.backends.ray.drains import Drains
from holdfast.orchestrator.cli.display import SilentDisplay
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.cli.targets.ray import job as ray_job
from holdfast.orchestrator.cli.targets.ray.job import RayJob
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.ray import host
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.gcs_journal import KvJournal
from holdfast.orchestrator.hosts.ray.host import RayHost
from holdfast.orchestrator.protocol.certificate import make_keys
from tests.unit.hosts.ray.test_gcs_journal import Store

from .fake_cluster import FakeCluster


class Unlisted(MemoryFileSystem):
    """A bucket that may be written and not listed."""

    protocol = "unlisted"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError(13, "no right to list")


fsspec.register_implementation("unlisted", Unlisted, clobber=True)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    log = logging.getLogger("holdfast")
    before = list(log.handlers)
    yield
    log.handlers[:] = before


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: Store) -> ControllerOrder:
    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "job"},
            "spec": {
                "entrypoint": {"script": "train.py"},
                "checkpoint": {"path": "unlisted://bucket/job"},
            },
        }
    )

    async def nothing(_drains: Drains) -> None: ...

    fake = FakeCluster(a=1)
    monkeypatch.setattr(placement_groups, "RayGroups", lambda job, _bundle: fake.of(job))
    monkeypatch.setattr(Drains, "watch", nothing)
    monkeypatch.setattr(cluster, "log_directory", lambda job, job_id: tmp_path)
    monkeypatch.setattr(host, "JobKeyValueStore", lambda job: store)
    monkeypatch.setattr(ray_job.kv, "JobKeyValueStore", lambda job: store)
    made = make_keys(names.tls("id"))
    return ControllerOrder(
        document=job_to_mapping(job), job="job", job_id="id", spec_directory=str(tmp_path),
        token=made.token, certificate=made.certificate, key=made.key,
    )  # fmt: skip


def watched(order: ControllerOrder) -> HoldfastError:
    """What whoever waits for the job is told."""
    with pytest.raises(HoldfastError) as told:
        RayJob(order, lambda *words: " ".join(words)).watch(SilentDisplay(stderr()))
    return told.value


def test_storage_that_cannot_be_listed_is_told_to_who_waits_as_a_failure(
    order: ControllerOrder,
) -> None:
    asyncio.run(RayHost(order).run())
    told = watched(order)
    assert "cannot be read (no right to list)" in str(told)
    assert told.exit_code == 1


def test_a_mistake_in_the_spec_is_told_as_one(
    order: ControllerOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_: 1 / 0)
    asyncio.run(RayHost(order).run())
    assert watched(order).exit_code == UserError.exit_code


def test_a_refusal_of_an_older_controller_is_read_as_a_mistake(
    order: ControllerOrder, store: Store
) -> None:
    asyncio.run(RayHost(order).run())
    record = json.loads(store.get(ray_job.kv.ENDED) or b"")
    del record["exit_code"]
    store.put(ray_job.kv.ENDED, json.dumps(record).encode())
    assert watched(order).exit_code == UserError.exit_code


def test_a_journal_that_cannot_be_written_yet_refuses_no_job(
    order: ControllerOrder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_head(_journal: KvJournal) -> None:
        raise JournalError("the head does not answer")

    monkeypatch.setattr(KvJournal, "commit", no_head)
    monkeypatch.setattr(Unlisted, "ls", MemoryFileSystem.ls)
    with pytest.raises(JournalError):
        asyncio.run(RayHost(order).run())
    assert not store.exists(ray_job.kv.ENDED)
