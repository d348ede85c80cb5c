"""The answer to a question about workers on its way: operator, API server, command line."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.hosts.kubernetes.spec_sync import SpecSync
from holdfast.orchestrator.kube import answer_parts, names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.protocol import messages as wire
from tests.unit.kube.fake_api import cluster_of

from .operator_harness import StatefulFakeApi

OWNER = Owner("team", "llm", "uid-team-llm")


def on_cluster(scenario: Callable[[StatefulFakeApi, KubeClient], Any]) -> None:
    async def run() -> None:
        api = StatefulFakeApi()
        async with cluster_of(api) as cluster:
            await scenario(api, cluster)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake API server takes requests of 1 MiB."""
    monkeypatch.setattr(limits, "CODE_PART_BYTES", 100_000)


class Operator:
    """The control API and the Events, as far as a question needs them."""

    def __init__(self, cluster: KubeClient, body: dict[str, Any]) -> None:
        this: Any = self
        self.control, self._body = self, body
        self.events: list[dict[str, str]] = []
        self.sync = SpecSync(OWNER, cluster, this, this, this)

    async def perform(self, verb: str, arguments: dict[str, Any]) -> wire.Reply:
        return wire.Reply(ok=True, detail="done", body=self._body)

    def record(self, severity: str, reason: str, text: str, annotations: dict[str, str]) -> None:
        self.events.append(annotations)

    async def answer(self, number: str) -> dict[str, str]:
        question = {"verb": "profile", "arguments": {}, "by": "ann", "id": number}
        answering = asyncio.ensure_future(self.sync._answer(json.dumps(question)))
        while not self.events:
            await asyncio.sleep(0)
        await answering
        return self.events.pop()


def test_a_short_answer_is_in_its_event_and_a_long_one_in_config_maps_until_it_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_parts, "KEPT_S", 0.0)
    long = {"traces": base64.b64encode(os.urandom(300_000)).decode()}

    async def scenario(api: StatefulFakeApi, cluster: KubeClient) -> None:
        found = await Operator(cluster, {"one": 1}).answer("7")
        assert json.loads(zlib.decompress(base64.b64decode(found[names.ANSWER]))) == {"one": 1}
        assert not [path for path in api.objects if "/configmaps/" in path]

        read: list[bytes] = []
        clear = answer_parts.clear

        async def read_first(*given: Any) -> None:
            read.append(await answer_parts.read(cluster, "team", "llm", "8", given[-1]))
            await clear(*given)

        monkeypatch.setattr(answer_parts, "clear", read_first)
        found = await Operator(cluster, long).answer("8")
        assert json.loads(zlib.decompress(read[0])) == long
        parts = [one for path, one in api.objects.items() if "/configmaps/" in path]
        assert len(parts) == int(found[names.ANSWER_PARTS]) > 1
        assert names.ANSWER not in found
        assert all(one["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid for one in parts)
        assert not any(one.get("binaryData") for one in parts), "it was read"
        with pytest.raises(HoldfastError, match="answer to another question; ask again"):
            await answer_parts.read(cluster, "team", "llm", "8", 1)

    on_cluster(scenario)


def test_an_answer_takes_the_place_of_an_older_one_and_stays_when_that_is_cleared() -> None:
    async def scenario(api: StatefulFakeApi, cluster: KubeClient) -> None:
        assert await answer_parts.write(cluster, OWNER, "1", bytes(250_000)) == 3
        assert await answer_parts.write(cluster, OWNER, "2", b"new") == 1
        await answer_parts.clear(cluster, OWNER, "1", 3)
        assert await answer_parts.read(cluster, "team", "llm", "2", 1) == b"new"
        with pytest.raises(HoldfastError, match="ask again"):
            await answer_parts.read(cluster, "team", "llm", "1", 3)

    on_cluster(scenario)
