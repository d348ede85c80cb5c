"""One TrainingJob and its operators, when the API server or a store has no time for it: what has
been is not forgotten, and what is wanted is done in the end.

Owns: these tests, against a small API server that keeps what it is told.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.orchestrator.api.v1alpha1.status import TrainingJobStatus
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.hosts.kubernetes import reconciler as job_module
from holdfast.orchestrator.hosts.kubernetes import storage_access, ttl
from holdfast.orchestrator.hosts.kubernetes.configmap_journal import WRITER
from holdfast.orchestrator.hosts.kubernetes.prior_status import TOLD
from holdfast.orchestrator.kube.errors import CONFIG_MAPS, JOBS, SECRETS
from holdfast.orchestrator.runtime import executor, job_runtime
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from tests.unit.kube.fake_api import BOUND_S, eventually, status
from tests.unit.kube.stateful_fake_api import BUSY, Request, StatefulFakeApi, operating, wanted

Document = dict[str, Any]
AT = "2026-01-01T00:00:00Z"
HAS_BEEN = {
    "jobId": "uid-team-llm",
    "startTime": AT,
    "step": 4711,
    "lastCheckpoint": {"step": 4700},
    "checkpointPath": "/c",
    "incidents": [{"number": 1, "class": "hang", "title": "rank 3", "time": AT}],
}
IS = {"state": "running", "worldSize": 16, "stepS": 0.5}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt comes soon."""
    monkeypatch.setattr(job_module, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(ttl, "RETRY_MIN_S", 0.01)


def busy_with(verb: str, what: str) -> Callable[[Request], Document | None]:
    """No time for these."""
    return lambda asked: BUSY if asked[0] == verb and what in asked[1] else None


# -- what has been -----------------------------------------------------------------------------
def test_a_job_that_trains_is_taken_up_although_it_is_to_be_suspended_and_something_failed_first(
    tmp_path: Path,
) -> None:
    """Suspend and upgrade at once: pods train, and the new operator's first requests fail."""

    async def story() -> None:
        api = StatefulFakeApi(refusal=busy_with("GET", "/secrets/"))
        trains = wanted("llm", suspend=True, checkpoint={"path": str(tmp_path)})
        trains["status"] = {**HAS_BEEN, **IS}
        async with operating(api) as world:
            taken = world.take(trains)
            told = await world.told("llm", "waits", lambda s: "trying again" in s.get("reason", ""))
            assert {name: told.get(name) for name in HAS_BEEN} == HAS_BEEN
            assert told["state"] == "pending" and not {"worldSize", "stepS"} & set(told)
            taken.update(world.seen("llm"))  # as the watch brings it
            api.refusal = lambda asked: None
            await eventually(lambda: taken.view is not None, "a controller")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("first", "then"),
    [({"suspend": True}, {"suspend": False}), ({"checkpoint": None}, {})],
    ids=["held", "invalid"],
)
def test_an_edit_that_comes_while_the_operator_looks_for_a_journal_is_not_missed(
    tmp_path: Path, first: Document, then: Document
) -> None:
    place = {"checkpoint": {"path": str(tmp_path)}}

    async def story() -> None:
        api = SlowApi()
        async with operating(api) as world:
            spec = {name: one for name, one in (place | first).items() if one is not None}
            taken = world.take(wanted("llm", **spec))
            await api.looked.wait()
            world.edit(taken, **place, **then)
            api.told.set()
            await eventually(lambda: taken.view is not None, "a controller")

    asyncio.run(story())


class SlowApi(StatefulFakeApi):
    """Is asked for a journal, and takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.looked, self.told = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and "/configmaps/" in request.path:
            self.looked.set()
            await self.told.wait()
        return await super().answer(request)


def test_a_job_is_taken_up_by_its_journal_when_no_status_tells_that_it_was_started(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        api = StatefulFakeApi()
        async with operating(api) as world:
            world.take(wanted("llm", checkpoint={"path": str(tmp_path)}))
            path = CONFIG_MAPS.path("team", "llm-journal")
            await eventually(lambda: bool(api.objects.get(path, {}).get("binaryData")), "a journal")
        before = wanted("llm", suspend=True, checkpoint={"path": str(tmp_path)})
        api.keep(JOBS.path("team", "llm"), before)  # without a status
        async with operating(api) as world:
            taken = world.take(before)
            await eventually(lambda: taken.view is not None, "a controller")

    asyncio.run(story())


@pytest.mark.parametrize("of_another", [False, True])
def test_a_job_that_was_never_started_is_held_and_leaves_nothing(of_another: bool) -> None:
    """Nor does the journal of an earlier job of its name count."""

    async def story() -> None:
        api = StatefulFakeApi()
        if of_another:
            metadata = {"name": "llm-journal", "ownerReferences": [{"uid": "another"}]}
            journal = {"metadata": metadata, "binaryData": {"tail-000001-a": ""}}
            api.keep(CONFIG_MAPS.path("team", "llm-journal"), journal)
        async with operating(api) as world:
            taken = world.take(wanted("llm", suspend=True, checkpoint={"path": "/c"}))
            told = await world.told("llm", "is held", lambda s: s.get("state") == "suspended")
            assert told["reason"] == "spec.suspend is set; nothing was started"
            assert "jobId" not in told and taken.view is None

    asyncio.run(story())


def test_what_a_controller_told_stays_when_it_has_to_end(tmp_path: Path) -> None:
    async def story() -> None:
        api = StatefulFakeApi()
        async with operating(api) as world:
            taken = world.take(wanted("llm", checkpoint={"path": str(tmp_path)}))
            before = await world.told("llm", "is taken up", lambda s: bool(s.get("jobId")))
            journal = CONFIG_MAPS.path("team", "llm-journal")
            api.objects[journal]["metadata"]["annotations"][WRITER] = "another"
            conflict = status(409, "Conflict", "changed")

            def lost(asked: Request) -> Document | None:
                return conflict if asked[0] == "PUT" else busy_with("GET", "/secrets/")(asked)

            api.refusal = lost
            world.edit(taken, nodes={"min": 1, "max": 3})
            after = await world.told("llm", "waits", lambda s: "trying" in s.get("reason", ""))
            assert taken.view is None
            kept = ("jobId", "startTime", "checkpointPath", "generation", "restarts")
            assert {name: after[name] for name in kept} == {name: before[name] for name in kept}

    asyncio.run(story())


def test_what_is_kept_of_a_status_are_fields_of_it() -> None:
    fields = {field.alias or name for name, field in TrainingJobStatus.model_fields.items()}
    assert set(TOLD) <= fields


# -- where its checkpoints are -----------------------------------------------------------------
@pytest.mark.parametrize("known_by", ["journal", "compacted journal", "status"])
def test_a_job_keeps_its_place_when_the_operator_gets_another_root_or_none(
    known_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        api = StatefulFakeApi()
        if known_by == "status":  # a journal of an older Holdfast
            monkeypatch.setattr(job_runtime, "JobSubmitted", as_before)
        place = f"{tmp_path}/one/team/llm"
        async with operating(api, f"{tmp_path}/one/") as world:
            if known_by == "compacted journal":
                monkeypatch.setattr(
                    "holdfast.orchestrator.hosts.kubernetes.configmap_journal.COMPACT_AT_BYTES", 1
                )
            taken = world.take(wanted("llm"))
            told = await world.told("llm", "is taken up", lambda s: bool(s.get("jobId")))
            assert told["checkpointPath"] == place
            if known_by == "compacted journal":
                world.edit(taken, nodes={"min": 1, "max": 3})
                journal = CONFIG_MAPS.path("team", "llm-journal")
                await eventually(
                    lambda: "snapshot" in api.objects[journal]["binaryData"], "a snapshot"
                )
        if known_by != "status":
            del world.seen("llm")["status"]["checkpointPath"]
        for root, held in ((f"{tmp_path}/two", True), ("", False)):
            async with operating(api, root) as world:
                taken = world.take(world.seen("llm"))
                await world.told("llm", "tells", lambda s: s.get("checkpointPath") == place)
                await eventually(lambda taken=taken: taken.view is not None, "a controller")
                assert world.welcome("llm").checkpoint_path == place
                world.edit(taken, suspend=held)
                state = "suspended" if held else "pending"
                await world.told("llm", "follows", lambda s, state=state: s["state"] == state)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["one"]

    asyncio.run(story())


def as_before(checkpoint_path: str, **fields: Any) -> JobSubmitted:
    return JobSubmitted(**fields)


# -- its end -----------------------------------------------------------------------------------
def ended(ttl_s: int | None, at: datetime.datetime | None = None) -> Document:
    """A job that is over."""
    given = {} if ttl_s is None else {"ttlSecondsAfterFinished": ttl_s}
    document = wanted("llm", checkpoint={"path": "/c"}, **given)
    at = at or datetime.datetime.now(datetime.UTC)
    document["status"] = {**HAS_BEEN, "state": "succeeded", "completionTime": at.isoformat()}
    return document


LONG_S = 10**6
DELETE = ("DELETE", JOBS.path("team", "llm"))


def test_a_deletion_that_fails_is_tried_again() -> None:
    async def story() -> None:
        api = StatefulFakeApi(refusal=busy_with("DELETE", "/trainingjobs/"))
        async with operating(api) as world:
            world.take(ended(0))
            await eventually(lambda: api.asked.count(DELETE) >= 3, "several attempts")
            events = [one for path, one in api.objects.items() if "/events/" in path]
            assert [one["reason"] for one in events] == ["NotDeleted"], "said once"
            api.refusal = lambda asked: None
            async with asyncio.timeout(BOUND_S):
                await world.tasks[0]
            assert JOBS.path("team", "llm") not in api.objects

    asyncio.run(story())


@pytest.mark.parametrize("before", [None, LONG_S])
def test_a_time_to_live_that_is_given_or_shortened_after_the_end_is_followed(
    before: int | None,
) -> None:
    async def story() -> None:
        api = StatefulFakeApi()
        async with operating(api) as world:
            taken = world.take(ended(before))
            await asyncio.sleep(0)
            world.edit(taken, ttlSecondsAfterFinished=0)
            async with asyncio.timeout(BOUND_S):
                await world.tasks[0]
            assert JOBS.path("team", "llm") not in api.objects

    asyncio.run(story())


@pytest.mark.parametrize("after", [None, LONG_S])
def test_a_time_to_live_that_is_taken_away_or_raised_after_the_end_is_followed(
    after: int | None,
) -> None:
    """Even when it is over, where the API server had no time to delete it."""

    async def story() -> None:
        api = StatefulFakeApi(refusal=busy_with("DELETE", "/trainingjobs/"))
        async with operating(api) as world:
            two_minutes_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=2)
            taken = world.take(ended(60, two_minutes_ago))
            await eventually(lambda: DELETE in api.asked, "an attempt")
            world.edit(taken, ttlSecondsAfterFinished=after)
            await eventually(lambda: not taken._changed.is_set(), "it to be seen")
            api.refusal = lambda asked: None
            attempts = api.asked.count(DELETE)
            world.edit(taken, ttlSecondsAfterFinished=0)
            async with asyncio.timeout(BOUND_S):
                await world.tasks[0]
            assert api.asked.count(DELETE) == attempts + 1
            assert JOBS.path("team", "llm") not in api.objects

    asyncio.run(story())


# -- its store ---------------------------------------------------------------------------------
class Hanging:
    """Stores that do not answer until they are let go, and who asked them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.let_go = threading.Event()
        prepare = CheckpointStore.prepare

        def hang(storage: CheckpointStore) -> None:
            if "/hangs/" in storage.path:
                self.asked.append(storage.path)
                self.let_go.wait(BOUND_S)
            prepare(storage)

        monkeypatch.setattr(CheckpointStore, "prepare", hang)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    stores = Hanging(monkeypatch)
    yield stores
    stores.let_go.set()


def test_stores_that_do_not_answer_hold_up_their_own_jobs_only(
    tmp_path: Path, hanging: Hanging
) -> None:
    """More of them than jobs are taken up at once."""

    async def story() -> None:
        async with operating(StatefulFakeApi(), str(tmp_path)) as world:
            many = 40
            for number in range(many):
                place = {"path": f"{tmp_path}/hangs/{number}"}
                world.take(wanted(f"job-{number}", "others", checkpoint=place))
            await eventually(lambda: len(hanging.asked) == many, "all of them to wait")
            taken = world.take(wanted("llm"))
            await eventually(lambda: taken.view is not None, "a controller")
            hanging.let_go.set()

    asyncio.run(story())


def test_a_job_whose_store_does_not_answer_says_so(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_access, "TOLD_S", 0.01)

    async def story() -> None:
        async with operating(StatefulFakeApi(), f"{tmp_path}/hangs") as world:
            taken = world.take(wanted("llm"))
            told = await world.told("llm", "waits", lambda s: "has not answered" in s["reason"])
            assert told["conditions"][0]["reason"] == "WaitingForStorage"
            assert told["reason"].startswith(f"{tmp_path}/hangs/team/llm has not answered")
            hanging.let_go.set()
            await eventually(lambda: taken.view is not None, "a controller")

    asyncio.run(story())


def test_however_often_a_job_tries_its_store_it_holds_one_thread(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_access, "PATIENCE_S", 0.01)
    monkeypatch.setattr(executor, "SETTLE_S", 0.01)

    async def story() -> None:
        api = StatefulFakeApi()
        async with operating(api, f"{tmp_path}/hangs") as world:
            taken = world.take(wanted("llm"))
            look = ("GET", SECRETS.path("team", "llm-agents"))
            await eventually(lambda: api.asked.count(look) >= 3, "several attempts")
            assert hanging.asked == [f"{tmp_path}/hangs/team/llm"]
            monkeypatch.setattr(storage_access, "PATIENCE_S", BOUND_S)
            hanging.let_go.set()
            await eventually(lambda: taken.view is not None, "a controller")

    asyncio.run(story())


def test_a_driver_that_connects_when_it_is_made_holds_up_nobody_else(tmp_path: Path) -> None:
    """As ftp does: here to a server that takes connections and says nothing."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            place = {"path": f"ftp://127.0.0.1:{silent.getsockname()[1]}/x"}
            patience = {"FSSPEC_FTP": json.dumps({"timeout": 3 * BOUND_S})}
            api = StatefulFakeApi()
            async with operating(api, str(tmp_path)) as world:
                waits = world.take(wanted("waits", checkpoint=place, env=patience))
                journal = CONFIG_MAPS.path("team", "waits-journal")
                await eventually(lambda: journal in api.objects, "to look into storage")
                taken = world.take(wanted("llm"))
                await eventually(lambda: taken.view is not None, "a controller")
                assert waits.view is None
                silent.close()
                told = await world.told("waits", "tells", lambda s: "opened" in s["reason"])
                assert told["reason"].startswith(f"{place['path']}: cannot be opened (")
                assert told["conditions"][0]["reason"] == "OperatorWaits"

    asyncio.run(story())
