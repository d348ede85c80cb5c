"""Addresses of spec.notify on Kubernetes: a Secret's key, and the hosts that the chart allows."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.hosts.kubernetes.webhooks import addresses
from holdfast.orchestrator.kube.errors import SECRETS
from holdfast.orchestrator.kube.names import Owner
from tests.unit.api.wrong_jobs import job, script
from tests.unit.kube.fake_api import FakeApi, cluster_of, status

OWNER = Owner("team-a", "llm", "uid")
URL = "https://hooks.slack.com/services/xoxb-1234"
SECRET = {"secret": {"name": "hook", "key": "url"}}
PATH = SECRETS.path("team-a", "hook")


def decided(
    server: dict[str, Any], hosts: tuple[str, ...] = ("hooks.slack.com",), **api: Any
) -> tuple[list[str], list[str]]:
    """The addresses, and the notes."""
    notes: list[str] = []

    async def decide() -> list[str]:
        async with cluster_of(FakeApi(**api)) as cluster:
            found = job_from_mapping(job(script(notify=[server]), "llm"))
            return await addresses(found, OWNER, cluster, hosts, notes.append)

    return asyncio.run(decide()), notes


def secret(text: str, key: str = "url") -> dict[str, Any]:
    return {"objects": {PATH: {"data": {key: base64.b64encode(text.encode()).decode()}}}}


def test_the_address_of_a_secret_is_used() -> None:
    assert decided(SECRET, **secret(f"{URL}\n")) == ([URL], [])
    assert decided({"url": URL}) == ([URL], [])
    assert decided({"url": "http://10.0.0.1/x"}, ("*",)) == (["http://10.0.0.1/x"], [])


@pytest.mark.parametrize(
    ("server", "api", "problem"),
    [
        (SECRET, {}, "spec.notify[0].secret: got key url of hook; expected a Secret of namespace"),
        (SECRET, secret(URL, "other"), "spec.notify[0].secret: got key url of hook"),
        (SECRET, secret("xoxb-1234"), "spec.notify[0].secret: got key url of hook"),
        (SECRET, secret("http://169.254.169.254/xoxb-1234"), "expected a host of notify.allowed"),
        ({"url": "https://kubernetes.default/xoxb-1234"}, {}, "spec.notify[0]: got another host"),
        (SECRET, {"refusals": [status(403, "Forbidden", "no")]}, "key url of hook cannot be read"),
    ],
)
def test_a_problem_is_named_without_the_address_and_the_job_goes_on(
    server: dict[str, Any], api: dict[str, Any], problem: str
) -> None:
    urls, (note,) = decided(server, **api)
    assert urls == [""] and problem in note and "xoxb" not in note
