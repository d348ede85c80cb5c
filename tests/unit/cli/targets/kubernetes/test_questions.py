"""A question on its way: API server, a command in a pod of the job, the job's controller."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from holdfast.orchestrator.cli.targets.kubernetes import job
from holdfast.orchestrator.cli.targets.kubernetes.job import ask, demand
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube.client import CHANNELS, Document
from holdfast.orchestrator.kube.errors import Forbidden
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.agent_server import AgentServer, Connection
from tests.unit.kube.fake_api import FakeApi, cluster_of, status
from tests.unit.runtime.test_agent_server import Job

from .pods import pod

JOB: Document = {"metadata": {"name": "one", "namespace": "space"}, "spec": {}}


@dataclass
class Kubelet(FakeApi):
    """Runs commands of exec in pods, as processes of this machine."""

    refusal: Document | None = None
    gone: set[str] = field(default_factory=set)
    """Pods that have just ended."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.endswith("/exec"):
            return await super().answer(request)
        if self.refusal is not None:
            return web.json_response(self.refusal, status=self.refusal["code"])
        if request.path.split("/")[-2] in self.gone:
            return web.json_response(status(404, "NotFound", "no such pod"), status=404)
        stream = web.WebSocketResponse(protocols=(CHANNELS,))
        await stream.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        for channel, data in enumerate(await process.communicate(), start=1):
            for at in range(0, len(data), 1000):
                await stream.send_bytes(bytes([channel]) + data[at : at + 1000])
        ended = {"status": "Failure" if process.returncode else "Success"}
        await stream.send_bytes(b"\x03" + json.dumps(ended).encode())
        await stream.close()
        return stream


class Controller(Job):
    """Refuses `profile`, and answers everything else with what it got."""

    async def answer(self, client: Connection, request: wire.Request) -> None:
        if request.verb == "profile":
            raise UserError("rank: got 9; expected 0 to 1")
        body = {"arguments": request.arguments, "long": "x" * 5000}
        client.send(wire.Reply(ok=True, detail=request.verb, body=body))


def asked(
    place: Path, verb: str, change: Callable[[Kubelet], object] = lambda api: None, **arguments: Any
) -> wire.Reply:
    """The answer to a question about a job with one pod that trains and one that starts."""

    async def scenario() -> wire.Reply:
        one, endpoint, api = Controller("space/one", place), AgentServer(), Kubelet()
        await endpoint.open(tls=True)
        one.register(endpoint)
        token = place / "token"
        token.write_text(one.token)
        command = [
            *("-P", "-m", "holdfast.workers.agent", "--job", one.name, "--node", "one-a"),
            *("--token-file", str(token), "--endpoint", f"{endpoint.address}:{endpoint.port}"),
            *("--tls", str(place), "--tls-name", one.tls_name),
        ]
        api.listed = [pod("one-b"), pod("one-a", rank="0")]
        for each in api.listed:
            worker = {"name": "worker", "command": [sys.executable], "args": command}
            each["spec"]["containers"] = [worker]
        change(api)
        try:
            async with cluster_of(api) as cluster:
                return await ask(cluster, JOB, verb, arguments)
        finally:
            await endpoint.close()

    return asyncio.run(scenario())


def test_the_controller_answers_a_command_in_a_pod(tmp_path: Path) -> None:
    answer = asked(tmp_path, "stacks", ranks=[0])
    assert answer.detail == "stacks" and answer.body["arguments"] == {"ranks": [0]}
    assert len(answer.body["long"]) == 5000, "it comes in several messages"


def test_what_the_controller_refuses_is_its_reply(tmp_path: Path) -> None:
    answer = asked(tmp_path, "profile", rank=9, seconds=1)
    assert not answer.ok and answer.detail == "rank: got 9; expected 0 to 1"


def test_without_the_right_to_run_commands_the_missing_one_is_named(tmp_path: Path) -> None:
    refusal = status(403, "Forbidden", "no")
    with pytest.raises(Forbidden, match="missing right: create pods/exec in namespace space") as e:
        asked(tmp_path, "stacks", lambda api: setattr(api, "refusal", refusal))
    assert e.value.exit_code == 2


def test_a_pod_that_has_ended_is_not_the_only_one_that_is_asked(tmp_path: Path) -> None:
    assert asked(tmp_path, "stacks", lambda api: api.gone.add("one-a")).detail == "stacks"
    with pytest.raises(HoldfastError, match="job one: stacks: "):
        asked(tmp_path, "stacks", lambda api: api.gone.update({"one-a", "one-b"}))


def test_a_job_without_a_running_pod_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got one, which is pending; expected one with a running"):
        asked(tmp_path, "stacks", lambda api: api.listed.clear())


def test_what_the_command_prints_without_an_answer_is_shown(tmp_path: Path) -> None:
    def without_token(api: Kubelet) -> None:
        (tmp_path / "token").unlink()

    with pytest.raises(HoldfastError, match=r"pod one-b: --token-file: got .*; expected a file"):
        asked(tmp_path, "stacks", without_token)


# -- requests ----------------------------------------------------------------------------------
PATH = "/apis/holdfast.dev/v1alpha1/namespaces/space/trainingjobs/one"


@dataclass
class Operator(FakeApi):
    """Keeps the job's object, and answers the request of its annotation; or never does."""

    answer_of: Document | None = None
    takes: bool = True

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method != "PATCH":
            return await super().answer(request)
        found = self.objects[request.path]
        value = (await request.json())["metadata"]["annotations"]["holdfast.dev/request"]
        annotations = {} if value is None or self.takes else {"holdfast.dev/request": value}
        found["metadata"]["annotations"] = annotations
        if value is not None and self.answer_of is not None:
            found["status"] = {"request": {"id": json.loads(value)["id"], **self.answer_of}}
        return web.json_response(found)


def demanded(api: Operator, verb: str, **arguments: Any) -> wire.Reply:
    metadata = {**JOB["metadata"], "uid": "u", "resourceVersion": "7"}
    api.objects[PATH] = {"metadata": metadata, "spec": {}}

    async def scenario() -> wire.Reply:
        async with cluster_of(api) as cluster:
            document = json.loads(json.dumps(api.objects[PATH]))
            return await demand(cluster, document, verb, {"by": "ann", **arguments}, "see kubectl")

    return asyncio.run(scenario())


def test_the_answer_to_a_request_comes_from_the_status() -> None:
    saved = {"accepted": True, "message": "the state after 8 steps goes to storage", "step": 7}
    answer = demanded(Operator(answer_of=saved), "checkpoint")
    assert (answer.ok, answer.detail, answer.body) == (True, saved["message"], {"step": 7})
    refused = demanded(Operator(answer_of={"accepted": False, "message": "rank: got 9"}), "chaos")
    assert not refused.ok and refused.detail == "chaos: rank: got 9"


@pytest.mark.parametrize("takes", [True, False])
def test_a_request_that_no_operator_takes_is_withdrawn(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "ACCEPT_TIMEOUT_S", 0.3)
    api = Operator(takes=takes)
    text = "has accepted the request and has not answered" if takes else "so it was withdrawn"
    with pytest.raises(HoldfastError, match=f"job one: chaos: .*{text}; see kubectl"):
        demanded(api, "chaos", kind="kill-worker")
    assert api.objects[PATH]["metadata"]["annotations"] == {}


def test_a_request_while_another_waits_is_refused() -> None:
    waiting = {"metadata": {**JOB["metadata"], "annotations": {"holdfast.dev/request": "{}"}}}
    with pytest.raises(UserError, match="chaos: got another request that waits"):
        asyncio.run(demand(None, waiting, "chaos", {"by": ""}, ""))  # type: ignore[arg-type]
