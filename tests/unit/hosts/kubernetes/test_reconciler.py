"""One job's reconciler when the API server or storage fails: no state or request is lost."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from holdfast.orchestrator.api.v1alpha1.status import TrainingJobStatus
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.core.journal import decode_records, encode_record
from holdfast.orchestrator.hosts.kubernetes.prior import PRIOR_FIELDS
from holdfast.orchestrator.hosts.kubernetes.reconciler import ReconcilerTiming
from holdfast.orchestrator.journal.configmap_store import WRITER
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document
from holdfast.orchestrator.kube.errors import CONFIG_MAPS, JOBS, SECRETS
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from tests.unit.kube.fake_api import BOUND_S, eventually, status

from .operator_harness import BUSY, QUICK, Request, StatefulFakeApi, running_operator, training_job

AT = "2026-01-01T00:00:00Z"
PAST_STATUS = {
    "jobId": "uid-team-llm",
    "startTime": AT,
    "step": 4711,
    "lastCheckpoint": {"step": 4700},
    "checkpointPath": "/c",
    "incidents": [{"number": 1, "class": "hang", "title": "rank 3", "time": AT}],
}
CURRENT_STATUS = {"state": "running", "worldSize": 16, "stepS": 0.5}


def busy_for(verb: str, path: str) -> Callable[[Request], Document | None]:
    """The API server rejects these requests as too many."""
    return lambda request: BUSY if request[0] == verb and path in request[1] else None


# -- earlier state -----------------------------------------------------------------------------
async def test_a_training_job_gets_a_controller_although_suspend_is_set_and_requests_failed(
    tmp_path: Path,
) -> None:
    """Suspend during an upgrade: pods train, and the first requests of the new operator fail."""
    api = StatefulFakeApi(reject=busy_for("GET", "/secrets/"))
    trains = training_job("llm", suspend=True, checkpoint={"path": str(tmp_path)})
    trains["status"] = {**PAST_STATUS, **CURRENT_STATUS}
    async with running_operator(api) as operator:
        job = operator.start(trains)
        found = await operator.status_when(
            "llm", "to wait", lambda s: "trying again" in s.get("reason", "")
        )
        assert {name: found.get(name) for name in PAST_STATUS} == PAST_STATUS
        assert found["state"] == "pending" and not {"worldSize", "stepS"} & set(found)
        job.update(operator.object("llm"))  # as the watch reports it
        api.reject = lambda request: None
        await eventually(lambda: job.view is not None, "a controller")


@pytest.mark.parametrize(
    ("first", "then"),
    [({"suspend": True}, {"suspend": False}), ({"checkpoint": None}, {})],
    ids=["suspended", "invalid"],
)
async def test_an_edit_while_the_operator_looks_for_a_journal_is_not_missed(
    tmp_path: Path, first: Document, then: Document
) -> None:
    place = {"checkpoint": {"path": str(tmp_path)}}
    api = SlowApi()
    async with running_operator(api) as operator:
        spec = {name: one for name, one in (place | first).items() if one is not None}
        job = operator.start(training_job("llm", **spec))
        await api.journal_requested.wait()
        operator.edit(job, **place, **then)
        api.resume.set()
        await eventually(lambda: job.view is not None, "a controller")


class SlowApi(StatefulFakeApi):
    """Answers requests for a journal only after `resume`."""

    def __init__(self) -> None:
        super().__init__()
        self.journal_requested, self.resume = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and "/configmaps/" in request.path:
            self.journal_requested.set()
            await self.resume.wait()
        return await super().answer(request)


async def test_a_job_with_a_journal_gets_a_controller_although_its_status_is_empty(
    tmp_path: Path,
) -> None:
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        operator.start(training_job("llm", checkpoint={"path": str(tmp_path)}))
        path = CONFIG_MAPS.path("team", "llm-journal")
        await eventually(lambda: bool(api.objects.get(path, {}).get("binaryData")), "a journal")
    before = training_job("llm", suspend=True, checkpoint={"path": str(tmp_path)})
    api.keep(JOBS.path("team", "llm"), before)  # without a status
    async with running_operator(api) as operator:
        job = operator.start(before)
        await eventually(lambda: job.view is not None, "a controller")


@pytest.mark.parametrize("of_another", [False, True])
async def test_a_suspended_job_that_was_never_started_has_no_controller(of_another: bool) -> None:
    """The journal of an earlier job of the same name does not count as a start."""
    api = StatefulFakeApi()
    if of_another:
        metadata = {"name": "llm-journal", "ownerReferences": [{"uid": "another"}]}
        journal = {"metadata": metadata, "binaryData": {"tail-000001-a": ""}}
        api.keep(CONFIG_MAPS.path("team", "llm-journal"), journal)
    async with running_operator(api) as operator:
        job = operator.start(training_job("llm", suspend=True, checkpoint={"path": "/c"}))
        found = await operator.status_when(
            "llm", "to be suspended", lambda s: s.get("state") == "suspended"
        )
        assert found["reason"] == "spec.suspend is set; nothing was started"
        assert "jobId" not in found and job.view is None


async def test_status_fields_of_a_controller_stay_when_it_has_to_end(tmp_path: Path) -> None:
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        job = operator.start(training_job("llm", checkpoint={"path": str(tmp_path)}))
        before = await operator.status_when("llm", "to be started", lambda s: bool(s.get("jobId")))
        journal = CONFIG_MAPS.path("team", "llm-journal")
        api.objects[journal]["metadata"]["annotations"][WRITER] = "another"
        conflict = status(409, "Conflict", "changed")

        def lost(request: Request) -> Document | None:
            return conflict if request[0] == "PUT" else busy_for("GET", "/secrets/")(request)

        api.reject = lost
        operator.edit(job, nodes={"min": 1, "max": 3})
        after = await operator.status_when(
            "llm", "to wait", lambda s: "trying" in s.get("reason", "")
        )
        assert job.view is None
        kept = ("jobId", "startTime", "checkpointPath", "generation", "restarts")
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_the_kept_fields_of_a_status_exist() -> None:
    fields = {field.alias or name for name, field in TrainingJobStatus.model_fields.items()}
    assert set(PRIOR_FIELDS) <= fields


# -- requests ----------------------------------------------------------------------------------
async def test_the_status_has_the_answer_to_the_request_of_an_annotation(tmp_path: Path) -> None:
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        job = operator.start(training_job("llm", checkpoint={"path": str(tmp_path)}))
        await eventually(lambda: job.view is not None, "a controller")
        wanted = {"verb": "checkpoint", "arguments": {}, "by": "ann", "id": "7"}
        operator.annotate(job, names.REQUEST, json.dumps(wanted))
        status = await operator.status_when("llm", "the answer", lambda s: "request" in s)
        answer = status["request"]
        assert (answer["id"], answer["accepted"]) == ("7", False)
        assert "got pending; expected a running job" in answer["message"]
        assert "checkpoint: " in events(api)["Refused"]["message"]


@pytest.mark.parametrize(
    "text", ["no JSON", 3000 * "[", '{"verb": "resize"}', '{"verb": "chaos", "arguments": 7}']
)
async def test_an_annotation_that_is_not_a_request_is_removed_and_reported(
    text: str, tmp_path: Path
) -> None:
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        job = operator.start(training_job("llm", checkpoint={"path": str(tmp_path)}))
        await eventually(lambda: job.view is not None, "a controller")
        operator.annotate(job, names.REQUEST, text)
        await eventually(lambda: "Refused" in events(api), "the report")
        assert "expected JSON such as" in events(api)["Refused"]["message"]


def events(api: StatefulFakeApi) -> dict[str, Document]:
    """The recorded Events by their reasons."""
    return {one["reason"]: one for path, one in api.objects.items() if "/events/" in path}


# -- checkpoint path ---------------------------------------------------------------------------
@pytest.mark.parametrize("known_by", ["journal", "compacted journal", "status"])
async def test_a_job_keeps_its_checkpoint_path_when_the_operator_has_another_root_or_none(
    known_by: str, tmp_path: Path
) -> None:
    api = StatefulFakeApi()
    path = f"{tmp_path}/one/team/llm"
    compact_at_bytes = 1 if known_by == "compacted journal" else None
    async with running_operator(
        api, f"{tmp_path}/one/", compact_at_bytes=compact_at_bytes
    ) as operator:
        job = operator.start(training_job("llm"))
        found = await operator.status_when("llm", "to be started", lambda s: bool(s.get("jobId")))
        assert found["checkpointPath"] == path
        if known_by == "compacted journal":
            operator.edit(job, nodes={"min": 1, "max": 3})
            journal = CONFIG_MAPS.path("team", "llm-journal")
            await eventually(
                lambda: "snap-" in str(api.objects[journal]["binaryData"]), "a snapshot"
            )
    if known_by == "status":
        remove_path_from_journal(api)
    else:
        del operator.object("llm")["status"]["checkpointPath"]
    for root, suspended in ((f"{tmp_path}/two", True), ("", False)):
        async with running_operator(api, root) as operator:
            job = operator.start(operator.object("llm"))
            await operator.status_when("llm", "the path", lambda s: s.get("checkpointPath") == path)
            await eventually(lambda job=job: job.view is not None, "a controller")
            assert operator.welcome("llm").checkpoint_path == path
            operator.edit(job, suspend=suspended)
            state = "suspended" if suspended else "pending"
            await operator.status_when(
                "llm", "the edit", lambda s, state=state: s["state"] == state
            )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["one"]


def remove_path_from_journal(api: StatefulFakeApi) -> None:
    """Remove the path from the journal, so that the status of the object counts."""
    data = api.objects[CONFIG_MAPS.path("team", "llm-journal")]["binaryData"]
    for key, value in data.items():
        records = []
        for now_ns, event in decode_records(base64.b64decode(value)):
            if isinstance(event, JobSubmitted):
                assert event.checkpoint_path
                event = msgspec.structs.replace(event, checkpoint_path="")
            records.append(encode_record(now_ns, event))
        data[key] = base64.b64encode(b"".join(records)).decode()


# -- time to live ------------------------------------------------------------------------------
def ended(ttl_s: int | None, at: datetime.datetime | None = None) -> Document:
    """A job that has ended."""
    given = {} if ttl_s is None else {"ttlSecondsAfterFinished": ttl_s}
    document = training_job("llm", checkpoint={"path": "/c"}, **given)
    at = at or datetime.datetime.now(datetime.UTC)
    document["status"] = {**PAST_STATUS, "state": "succeeded", "completionTime": at.isoformat()}
    return document


LONG_S = 10**6
DELETE = ("DELETE", JOBS.path("team", "llm"))


async def test_a_failed_deletion_is_retried() -> None:
    api = StatefulFakeApi(reject=busy_for("DELETE", "/trainingjobs/"))
    async with running_operator(api) as operator:
        operator.start(ended(0))
        await eventually(lambda: api.requests.count(DELETE) >= 3, "several attempts")
        found = [one["reason"] for path, one in api.objects.items() if "/events/" in path]
        assert found == ["NotDeleted"], "recorded once"
        api.reject = lambda request: None
        async with asyncio.timeout(BOUND_S):
            await operator.tasks[0]
        assert JOBS.path("team", "llm") not in api.objects


@pytest.mark.parametrize("before", [None, LONG_S])
async def test_a_time_to_live_that_is_set_or_shortened_after_the_end_applies(
    before: int | None,
) -> None:
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        job = operator.start(ended(before))
        await asyncio.sleep(0)
        operator.edit(job, ttlSecondsAfterFinished=0)
        async with asyncio.timeout(BOUND_S):
            await operator.tasks[0]
        assert JOBS.path("team", "llm") not in api.objects


@pytest.mark.parametrize("after", [None, LONG_S])
async def test_a_time_to_live_that_is_removed_or_raised_after_the_end_applies(
    after: int | None,
) -> None:
    """The change counts also after the expiry, while the API server rejects the deletion."""
    api = StatefulFakeApi(reject=busy_for("DELETE", "/trainingjobs/"))
    async with running_operator(api) as operator:
        two_minutes_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=2)
        job = operator.start(ended(60, two_minutes_ago))
        await eventually(lambda: DELETE in api.requests, "an attempt")
        operator.edit(job, ttlSecondsAfterFinished=after)
        await eventually(lambda: not job._changed.is_set(), "the edit to be read")
        api.reject = lambda request: None
        attempts = api.requests.count(DELETE)
        operator.edit(job, ttlSecondsAfterFinished=0)
        async with asyncio.timeout(BOUND_S):
            await operator.tasks[0]
        assert api.requests.count(DELETE) == attempts + 1
        assert JOBS.path("team", "llm") not in api.objects


# -- storage -----------------------------------------------------------------------------------
class HangingStorage:
    """Storage below /hangs/ that does not answer before `resume`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[str] = []
        self.resume = threading.Event()
        prepare = CheckpointStore.prepare

        def hang(store: CheckpointStore) -> None:
            if "/hangs/" in store.path:
                self.requests.append(store.path)
                self.resume.wait(BOUND_S)
            prepare(store)

        monkeypatch.setattr(CheckpointStore, "prepare", hang)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStorage]:
    storage = HangingStorage(monkeypatch)
    yield storage
    storage.resume.set()


async def test_storage_that_does_not_answer_holds_up_its_own_jobs_only(
    tmp_path: Path, hanging: HangingStorage
) -> None:
    """More of them than the number of jobs that may start at once."""
    async with running_operator(StatefulFakeApi(), f"{tmp_path}/root") as operator:
        many = 40
        for number in range(many):
            place = {"path": f"{tmp_path}/hangs/{number}"}
            operator.start(training_job(f"job-{number}", "others", checkpoint=place))
        await eventually(lambda: len(hanging.requests) == many, "all of them to wait")
        job = operator.start(training_job("llm"))
        await eventually(lambda: job.view is not None, "a controller")
        hanging.resume.set()


async def test_a_job_reports_that_its_storage_does_not_answer(
    tmp_path: Path, hanging: HangingStorage
) -> None:
    async with running_operator(StatefulFakeApi(), f"{tmp_path}/hangs") as operator:
        operator.context.timing = ReconcilerTiming(storage_notice_s=0.01)
        job = operator.start(training_job("llm"))
        found = await operator.status_when(
            "llm", "to wait", lambda s: "has not answered" in s["reason"]
        )
        assert found["conditions"][0]["reason"] == "WaitingForStorage"
        assert found["reason"].startswith(f"{tmp_path}/hangs/team/llm has not answered")
        hanging.resume.set()
        await eventually(lambda: job.view is not None, "a controller")


async def test_a_job_holds_one_thread_however_often_it_tries_its_storage(
    tmp_path: Path, hanging: HangingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = StatefulFakeApi()
    async with running_operator(api, f"{tmp_path}/hangs") as operator:
        operator.context.timing = replace(QUICK, storage_timeout_s=0.01)
        job = operator.start(training_job("llm"))
        request = ("GET", SECRETS.path("team", "llm-agents"))
        await eventually(lambda: api.requests.count(request) >= 3, "several attempts")
        assert hanging.requests == [f"{tmp_path}/hangs/team/llm"]
        operator.context.timing = QUICK
        hanging.resume.set()
        await eventually(lambda: job.view is not None, "a controller")


async def test_a_driver_that_connects_in_its_constructor_holds_up_its_own_job_only(
    tmp_path: Path,
) -> None:
    """The ftp driver does; here it connects to a server that sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"path": f"ftp://127.0.0.1:{silent.getsockname()[1]}/x"}
        patience = {"FSSPEC_FTP": json.dumps({"timeout": 3 * BOUND_S})}
        api = StatefulFakeApi()
        async with running_operator(api, str(tmp_path)) as operator:
            waits = operator.start(training_job("waits", checkpoint=place, env=patience))
            journal = CONFIG_MAPS.path("team", "waits-journal")
            await eventually(lambda: journal in api.objects, "the storage to be opened")
            job = operator.start(training_job("llm"))
            await eventually(lambda: job.view is not None, "a controller")
            assert waits.view is None
            silent.close()
            found = await operator.status_when(
                "waits", "an error", lambda s: "opened" in s["reason"]
            )
            assert found["reason"].startswith(f"{place['path']}: cannot be opened (")
            assert found["conditions"][0]["reason"] == "OperatorWaits"
