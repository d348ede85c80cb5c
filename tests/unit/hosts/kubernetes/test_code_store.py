"""Uploaded code on its way: command line, ConfigMaps, operator, agent. The API server is a fake
that keeps objects; a real one is in tests/e2e/kubernetes."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import cast

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.cli import code_files
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.kubernetes import code_store
from holdfast.orchestrator.hosts.kubernetes.code_store import ClusterCodeStore
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.agent_server import AgentConnection
from holdfast.orchestrator.runtime.code_sender import CodeMissing, CodeSender
from holdfast.workers.agent.process.uploaded_code import CodeUnavailable, UploadedCode
from tests.unit.kube.fake_api import cluster_of

from .operator_harness import BUSY, StatefulFakeApi, running_operator, training_job

OWNER = Owner("team", "llm", "uid-team-llm")
OTHER = Owner("team", "llm", "uid-of-an-earlier-one")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> code_files.Code:
    """Code of two small parts: the fake API server takes requests of 1 MiB."""
    monkeypatch.setattr(limits, "CODE_PART_BYTES", 100_000)
    place = tmp_path / "code"
    place.mkdir()
    (place / "train.py").write_text("print()\n")
    (place / "table.bin").write_bytes(os.urandom(limits.CODE_PART_BYTES))
    return code_files.pack(place)


class Node:
    """An agent's side, connected to the sender without a network."""

    def __init__(self, cluster: KubeClient, repeat_s: float = 30.0) -> None:
        links = cast(dict[str, AgentConnection], {"a": self})
        self.sender = CodeSender(ClusterCodeStore(cluster, OWNER), links, logging.getLogger())
        self.requests: list[wire.FetchCode] = []
        self.code = UploadedCode(self._request, repeat_s)
        self.lost = 0
        """Number of answers that are lost."""

    def _request(self, request: wire.FetchCode) -> None:
        self.requests.append(request)
        self.sender.requested("a", request)

    def send(self, message: wire.Message) -> None:
        """The controller's: through the encoding, as on a connection."""
        decoded = wire.decode(wire.encode(message)[4:])
        assert isinstance(decoded, wire.CodePart)
        if self.lost:
            self.lost -= 1
        else:
            self.code.received(decoded)


@pytest.fixture
def api() -> StatefulFakeApi:
    return StatefulFakeApi()


@pytest.fixture
def cluster(api: StatefulFakeApi) -> AbstractAsyncContextManager[KubeClient]:
    return cluster_of(api)


async def upload(cluster: KubeClient, owner: Owner, code: code_files.Code) -> None:
    await ClusterCodeStore(cluster, owner).upload(code.name, code.archive)


def maps(api: StatefulFakeApi) -> list[Document]:
    return [one for path, one in api.objects.items() if "/configmaps/" in path]


async def test_the_files_of_the_directory_arrive_on_the_node(
    code: code_files.Code, api: StatefulFakeApi, cluster: KubeClient
) -> None:
    await upload(cluster, OWNER, code)
    await upload(cluster, OWNER, code)  # what is there is not uploaded again
    for one in maps(api):
        assert one["immutable"]
        assert one["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid
    node = Node(cluster)
    where = Path(await node.code.directory(code.name))
    assert sorted(path.name for path in where.iterdir()) == ["table.bin", "train.py"]
    assert await node.code.directory(code.name) == str(where)
    assert [request.part for request in node.requests] == [0, 1], "code of two parts"
    node.code.close()
    assert not where.exists()


async def test_a_part_that_is_lost_is_requested_again(
    code: code_files.Code, api: StatefulFakeApi, cluster: KubeClient
) -> None:
    await upload(cluster, OWNER, code)
    node = Node(cluster, repeat_s=0.2)
    node.lost = 1
    assert Path(await node.code.directory(code.name), "train.py").exists()
    api.reject = lambda request: BUSY if len(node.requests) < 5 else None
    with pytest.raises(CodeUnavailable, match="not there"):
        await node.code.directory("b" * 64)
    node.code.close()


async def test_missing_foreign_and_changed_archives_are_refused_by_name(
    code: code_files.Code, api: StatefulFakeApi, cluster: KubeClient
) -> None:
    node = Node(cluster)
    with pytest.raises(CodeUnavailable, match=r"llm-code-.*-0: is not there"):
        await node.code.directory(code.name)
    await upload(cluster, OTHER, code)
    with pytest.raises(CodeUnavailable, match="belongs to another job"):
        await node.code.directory(code.name)
    with pytest.raises(UserError, match="belongs to another job"):
        await upload(cluster, OWNER, code)
    for one in maps(api):
        one["metadata"]["ownerReferences"] = [names.owner_reference("llm", OWNER.uid)]
        one["binaryData"] = {"part": "AAAA"}
    with pytest.raises(CodeUnavailable, match="damaged"):
        await node.code.directory(code.name)
    store = ClusterCodeStore(cluster, OWNER)
    del maps(api)[0]["binaryData"]
    with pytest.raises(CodeMissing, match="holds no part"):
        await store.part(code.name, 0)
        await store.part(code.name, 1)


async def test_old_archives_are_deleted_and_those_of_other_jobs_are_not(
    tmp_path: Path, api: StatefulFakeApi, cluster: KubeClient
) -> None:
    script, found = tmp_path / "train.py", []
    for number in range(3):
        script.write_text(f"print({number})\n")
        found.append(code_files.pack(tmp_path))
        await upload(cluster, OWNER, found[-1])
    api.objects[CONFIG_MAPS.path("team")] = {
        "metadata": {"resourceVersion": "1"},
        "items": [one | {"metadata": one["metadata"] | {"uid": "u"}} for one in maps(api)],
    }
    await ClusterCodeStore(cluster, OTHER).delete_others()
    assert len(maps(api)) == 3
    await ClusterCodeStore(cluster, OWNER).delete_others("", found[1].name, found[2].name)
    digits = [one["metadata"]["labels"][code_store.LABEL_CODE] for one in maps(api)]
    assert digits == [one.name[: code_store.DIGITS] for one in found[1:]]


@pytest.mark.timeout(60)
async def test_a_job_waits_for_its_code_and_follows_new_code_once_it_is_there(
    tmp_path: Path, code: code_files.Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "WAIT_S", 0.4)
    api = StatefulFakeApi()
    async with running_operator(api) as operator:
        document = training_job("llm", code=code.name, checkpoint={"path": str(tmp_path)})
        job = operator.start(document)
        text = "was not uploaded"
        await operator.status_when("llm", "to wait", lambda s: text in s.get("reason", ""))
        cluster = operator.context.cluster
        await upload(cluster, OWNER, code)
        await operator.status_when("llm", "to start", lambda s: s.get("jobId"))
        other = "c" * 64
        operator.edit(job, code=other)
        text = "is not there; upload the code"
        await operator.status_when("llm", "to refuse it", lambda s: text in str(s))
        assert job._runtime is not None
        assert job._runtime.state.job.spec.code == code.name
        await ClusterCodeStore(cluster, OWNER).upload(other, b"x")
        operator.edit(job, code=other)
        while job._runtime.state.job.spec.code != other:
            await asyncio.sleep(0.01)
        operator.edit(job, code=None)
        while job._runtime.state.job.spec.code is not None:
            await asyncio.sleep(0.01)


async def test_a_host_without_uploaded_code_says_so() -> None:
    sent: list[wire.Message] = []

    class Link:
        def send(self, message: wire.Message) -> None:
            sent.append(message)

    links = cast(dict[str, AgentConnection], {"a": Link()})
    sender = CodeSender(None, links, logging.getLogger())
    sender.requested("a", wire.FetchCode(code="d" * 64, part=0))
    while not sent:
        await asyncio.sleep(0)
    assert isinstance(sent[0], wire.CodePart) and "has none" in sent[0].problem


async def test_the_store_reports_an_api_server_that_does_not_answer(
    code: code_files.Code, api: StatefulFakeApi, cluster: KubeClient
) -> None:
    api.reject = lambda request: BUSY
    with pytest.raises(HoldfastError) as found:
        await ClusterCodeStore(cluster, OWNER).part(code.name, 0)
    assert not isinstance(found.value, CodeMissing), "another attempt may succeed"
