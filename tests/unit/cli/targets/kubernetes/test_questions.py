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

from holdfast.orchestrator.cli.targets.kubernetes.job import ask
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube.client import CHANNELS, Document
from holdfast.orchestrator.kube.errors import Forbidden
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.agent_server import AgentServer, ReplyStream
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

    async def answer(self, stream: ReplyStream, request: wire.Request) -> None:
        if request.verb == "profile":
            raise UserError("rank: got 9; expected 0 to 1")
        body = {"arguments": request.arguments, "long": "x" * 5000}
        stream.reply(wire.Reply(ok=True, detail=request.verb, body=body))


def asked(
    place: Path, verb: str, change: Callable[[Kubelet], object] = lambda api: None, **arguments: Any
) -> wire.Reply:
    """The answer to a question about a job with one pod that trains and one that starts."""

    async def scenario() -> wire.Reply:
        job, endpoint, api = Controller("space/one", place), AgentServer(), Kubelet()
        await endpoint.open(tls=True)
        job.register(endpoint)
        token = place / "token"
        token.write_text(job.token)
        command = [
            *("-P", "-m", "holdfast.workers.agent", "--job", job.name, "--node", "one-a"),
            *("--token-file", str(token), "--endpoint", f"{endpoint.address}:{endpoint.port}"),
            *("--tls", str(place), "--tls-name", job.tls_name),
        ]
        api.listed = [pod("one-b"), pod("one-a", rank="0")]
        for one in api.listed:
            worker = {"name": "worker", "command": [sys.executable], "args": command}
            one["spec"]["containers"] = [worker]
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
