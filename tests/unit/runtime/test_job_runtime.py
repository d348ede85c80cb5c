"""Many controllers in one process; none costs anything while its job waits."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.core.actions import RequestNodes
from holdfast.orchestrator.core.events import CancelRequested
from holdfast.orchestrator.core.journal import JournalLost
from holdfast.orchestrator.core.state import Keeping
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.agent_server import AgentServer
from holdfast.orchestrator.runtime.checkpoint_store.async_store import (
    THREAD_NAME_PREFIX,
    SerialExecutor,
    ThreadedCheckpointStore,
)
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.job_runtime import JobRuntime, JobRuntimeTiming
from holdfast.workers.agent.storage import persist
from holdfast.workers.agent.storage.memfd import Memfd
from holdfast.workers.checkpoint.layout import make_layout

from .harness import BOUND_S, FakeBackend, make_job
from .test_commits import MemoryJournal


@dataclass
class Cluster:
    """One agent server and the jobs behind it."""

    path: Path
    endpoint: AgentServer = field(default_factory=AgentServer)
    jobs: list[Hosted] = field(default_factory=list)

    async def host(self, name: str, journal: MemoryJournal | None = None, **spec: Any) -> Hosted:
        hosted = Hosted(self, make_job(name.rpartition("/")[2], **spec), name)
        hosted.backend.auto = True
        self.jobs.append(hosted)
        await hosted.start(journal or MemoryJournal())
        return hosted

    async def close(self) -> None:
        for hosted in self.jobs:
            await hosted.stop()
            await hosted.backend.close(release=True)
        await self.endpoint.close()


class Hosted:
    """A job of the cluster. A FakeAgent takes it for the directory of its job."""

    def __init__(self, cluster: Cluster, job: TrainingJob, name: str) -> None:
        self.cluster, self.name, self._job = cluster, name, job
        self.backend = FakeBackend()
        self.backend.directory = self  # type: ignore[assignment]
        self.task: asyncio.Task[None] | None = None
        self.timing = JobRuntimeTiming()

    def job(self) -> TrainingJob:
        return self._job

    def token(self) -> str:
        return f"token of {self.name}"

    def controller(self) -> dict[str, Any]:
        return {"address": self.cluster.endpoint.address, "port": self.cluster.endpoint.port}

    def checkpoint_path(self, job: TrainingJob) -> str:
        return str(self.cluster.path / self.name.replace("/", "-"))

    async def start(self, journal: MemoryJournal) -> None:
        self.journal = journal
        storage = CheckpointStore(self.checkpoint_path(self._job), self.name)
        self.runtime = JobRuntime(
            self._job, key=self.name, job_id=self.name, spec_directory="", log_directory="",
            checkpoint_path=self.checkpoint_path(self._job), token=self.token(),
            backend=self.backend, endpoint=self.cluster.endpoint, timing=self.timing,
            storage=ThreadedCheckpointStore(lambda: storage, SerialExecutor()),
        )  # fmt: skip
        fresh = journal.snapshot is None and not journal.records
        await self.runtime.prepare(fresh=fresh)
        await self.runtime.begin(journal)
        self.task = asyncio.create_task(self.runtime.run())

    async def stop(self) -> None:
        """Stop like an operator that ends: agents get no message."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
            self.task = None
        await self.runtime.close()

    async def until(self, condition: Any) -> Any:
        async with asyncio.timeout(BOUND_S):
            while not condition(view := self.runtime.view()):
                seen = self.runtime.changes.count
                await self.runtime.changes.after(seen)
        return view


async def test_jobs_of_one_name_in_two_namespaces_are_independent(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    one = await cluster.host("red/tiny")
    two = await cluster.host("blue/tiny")
    for hosted in (one, two):
        view = await hosted.until(lambda view: view.state == "running")
        assert view.world_size == 4 and len(hosted.runtime.links) == 2
    one.backend.kill("node-0")
    await one.until(lambda view: view.state == "running" and view.num_incidents == 1)
    assert two.runtime.view().num_incidents == 0
    reply = await two.runtime.control.perform("cancel", {"by": "test"})
    assert reply.ok
    await two.until(lambda view: view.state == "cancelled")
    assert two.task is not None
    await two.task
    assert two.backend.agents == {} and len(one.backend.agents) == 2
    assert one.runtime.view().state == "running"
    await cluster.close()


async def test_the_next_operator_takes_every_job_over_from_its_journal(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    jobs = [await cluster.host(name) for name in ("a/x", "a/y", "b/x")]
    for hosted in jobs:
        await hosted.until(lambda view: view.state == "running")
    for hosted in jobs:
        await hosted.stop()
        assert len(hosted.backend.agents) == 2, "training continues"
    for hosted in jobs:
        await hosted.start(hosted.journal.reopened())
    for hosted in jobs:
        await hosted.until(lambda view: view.state == "running" and view.controller_restarts)
        async with asyncio.timeout(BOUND_S):
            while len(hosted.runtime.links) < 2:
                await asyncio.sleep(0)
        assert hosted.runtime.view().num_incidents == 0
    await cluster.close()


async def test_watchers_of_events_are_woken(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    job = await cluster.host("a/x")
    await job.until(lambda view: view.state == "running")
    events = job.runtime.events
    seen = events.count
    await job.runtime.control.perform("cancel", {"by": "test"})
    async with asyncio.timeout(BOUND_S):
        await events.after(seen)
    await cluster.close()


async def test_waiting_jobs_cost_one_task_and_no_thread(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    before = len(asyncio.all_tasks())
    await cluster.endpoint.open()
    for number in range(100):
        hosted = Hosted(cluster, make_job("waits"), f"space/job-{number}")
        hosted.backend.room = False
        cluster.jobs.append(hosted)
        await hosted.start(MemoryJournal())
    for hosted in cluster.jobs:
        state = hosted.runtime.state
        async with asyncio.timeout(BOUND_S):
            while any(isinstance(one, RequestNodes) for one in state.inflight.values()):
                await asyncio.sleep(0)
        assert state.phase == "pending"
    assert len(asyncio.all_tasks()) - before == 100 + 1, "and one for the port"
    async with asyncio.timeout(BOUND_S):
        while any(one.name.startswith(THREAD_NAME_PREFIX) for one in threading.enumerate()):
            await asyncio.sleep(0.01)
    await cluster.close()
    assert len(asyncio.all_tasks()) == before


async def test_a_controller_that_lost_its_journal_ends_without_further_actions(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    hosted = await cluster.host("space/x")
    await hosted.until(lambda view: view.state == "running")
    hosted.journal.failure = JournalLost("another controller writes it")
    hosted.runtime.submit(CancelRequested(by="test"))
    assert hosted.task is not None
    with pytest.raises(JournalLost):
        await hosted.task
    await hosted.stop()
    assert len(hosted.backend.agents) == 2
    for agent in hosted.backend.agents.values():
        assert not any(type(one).__name__ == "Stop" for one in agent.received)
    await cluster.close()


async def test_a_store_that_does_not_answer_does_not_delay_a_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    hosted = await cluster.host("space/x")
    await hosted.until(lambda view: view.state == "running")
    await hosted.stop()
    answers = threading.Event()
    hosted.timing = JobRuntimeTiming(storage_listing_s=0.05)
    monkeypatch.setattr(CheckpointStore, "prepare", lambda self: answers.wait(BOUND_S))
    await hosted.start(hosted.journal.reopened())
    await hosted.until(lambda view: view.state == "running" and view.controller_restarts == 1)
    answers.set()
    await cluster.close()


async def test_user_errors_are_raised_before_anything_is_written(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    (tmp_path / "space-x").write_text("a file where the checkpoints should be")
    journal = MemoryJournal()
    with pytest.raises(UserError, match=r"spec\.checkpoint\.path"):
        await cluster.host("space/x", journal)
    assert journal.kept == journal.pending == []
    await cluster.close()


async def test_a_new_job_does_not_begin_at_step_0_where_all_manifests_are_damaged(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    directory = tmp_path / "space-x" / "step-00000009.gen-1"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000009.gen-1 is damaged.*checkpoint repair"):
        await cluster.host("space/x")
    await cluster.close()


@pytest.mark.parametrize("doubts", [False, True])
async def test_the_next_controller_commits_what_agents_wrote_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubts: bool
) -> None:
    """Not if replicas of that generation may differ."""
    cluster = Cluster(tmp_path)
    try:
        job = await cluster.host("alone")
        await job.stop()
        generation = job.runtime.state.generation
        place = Path(job.checkpoint_path(job.job()))
        for shard in range(2):
            identity = {"generation": generation, "shard": shard, "num_shards": 2}
            data = bytes(make_layout([], **identity, extra=b"{}").render(41, [], b"{}"))
            written = StagedShard(41, generation, shard, 2, len(data))
            directory, name = directory_name(41, generation), shard_file_name(shard, 2)
            memory = Memfd("shard", len(data))
            os.write(memory.fd, data)
            done = persist.write_shard(memory, len(data), str(place), directory, name)
            note = persist.note_of(written, name, done, Mesh(shard=2))
            persist.write_note(note, str(place), directory, name)
        monkeypatch.setattr(Keeping, "doubts", lambda _keeping, number: doubts)
        await job.start(job.journal.reopened())
        assert [one.step for one in job.runtime.view().checkpoints] == ([] if doubts else [41])
    finally:
        await cluster.close()


async def test_the_first_commit_of_a_generation_deletes_what_earlier_ones_left_incomplete(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    await cluster.endpoint.open()
    try:
        job = await cluster.host("alone")
        await job.until(lambda view: view.state == "running")
        left = Path(job.checkpoint_path(job.job())) / directory_name(5, 1)
        left.mkdir(parents=True)
        (left / shard_file_name(0, 2)).write_bytes(bytes(10))
        job.backend.kill("node-0")
        await job.until(lambda view: view.state == "running" and view.num_incidents == 1)
        for agent in job.backend.agents.values():
            agent.advance(20)
            agent.persist(20)
        await job.until(lambda view: view.checkpoints and not left.exists())
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    ("chosen", "auto_s", "seconds"),
    [("auto", None, None), ("auto", 900.0, 900.0), ("never", 900.0, None), (60.0, None, 60.0)],
)
async def test_agents_learn_how_long_they_may_be_without_a_controller(
    tmp_path: Path, chosen: float | str, auto_s: float | None, seconds: float | None
) -> None:
    cluster = Cluster(tmp_path)
    try:
        job = await cluster.host("alone", recovery={"controllerAbsenceSeconds": chosen})
        job.runtime._auto_absence_s = auto_s
        assert job.runtime._welcome().controller_absence_s == seconds
    finally:
        await cluster.close()
