"""Credentials that expire are reloaded: a real exec plugin in a kubeconfig and a fake API server
that requires a token. Against a real API server: tests/e2e/kubernetes/test_command_refusals.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import PODS, NotAuthenticated
from tests.unit.kube.fake_api import FakeApi, serving

PLUGIN = """#!/bin/sh
echo run >> {directory}/runs
token=$(cat {directory}/token) || exit 1
cat <<END
{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
  "status": {{"token": "$token"}}}}
END
"""


class Plugin:
    """An exec plugin for tokens, as clouds have one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.program = directory / "plugin"
        self.program.write_text(PLUGIN.format(directory=directory))
        self.program.chmod(0o755)

    def set_token(self, token: str) -> None:
        (self._directory / "token").write_text(token)

    @property
    def num_runs(self) -> int:
        return len((self._directory / "runs").read_text().splitlines())

    def kubeconfig(self, url: str) -> Path:
        command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(self.program)}
        path = self._directory / "kubeconfig"
        path.write_text(kubeconfig_text(url, {"exec": {**command, "interactiveMode": "Never"}}))
        return path


def kubeconfig_text(url: str, user: dict[str, Any]) -> str:
    return yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "small", "cluster": {"server": url}}],
        "users": [{"name": "ann", "user": user}],
        "contexts": [{"name": "small", "context": {"cluster": "small", "user": "ann"}}],
        "current-context": "small",
    })  # fmt: skip


@asynccontextmanager
async def connected(api: FakeApi, plugin: Plugin) -> AsyncIterator[KubeClient]:
    async with serving(api) as url:
        kubeconfig = plugin.kubeconfig(url)
        async with await KubeClient.connect(kubeconfig=kubeconfig) as cluster:
            yield cluster


async def test_a_refused_token_is_reloaded_once_for_all_waiting_requests(tmp_path: Path) -> None:
    api, plugin = FakeApi(token="first"), Plugin(tmp_path)
    plugin.set_token("first")
    async with connected(api, plugin) as cluster:
        await cluster.list_all(PODS)
        assert plugin.num_runs == 1
        api.token = "second"
        plugin.set_token("second")
        await asyncio.gather(*(cluster.list_all(PODS) for _ in range(5)))
        assert plugin.num_runs == 2


async def test_a_watch_continues_with_a_new_token_after_the_first_expired(tmp_path: Path) -> None:
    api, plugin = FakeApi(token="first"), Plugin(tmp_path)
    plugin.set_token("first")
    async with connected(api, plugin) as cluster:
        versions = []
        for version in ("1", "2"):
            event = asyncio.ensure_future(anext(cluster.watch(PODS, version)))
            watch = await api.next_watch()
            watch.send("BOOKMARK", {"metadata": {"resourceVersion": watch.version}})
            versions.append((await event)[1]["metadata"]["resourceVersion"])
            watch.end()
            api.token = "second"
            plugin.set_token("second")
        assert versions == ["1", "2"] and plugin.num_runs == 2


async def test_a_token_that_was_replaced_in_a_kubeconfig_is_read_again(tmp_path: Path) -> None:
    api, path = FakeApi(token="first"), tmp_path / "kubeconfig"
    async with serving(api) as url:
        path.write_text(kubeconfig_text(url, {"token": "first"}))
        async with await KubeClient.connect(kubeconfig=path) as cluster:
            await cluster.list_all(PODS)
            api.token = "second"
            with pytest.raises(NotAuthenticated, match="log in again"):
                await cluster.list_all(PODS)
            path.write_text(kubeconfig_text(url, {"token": "second"}))
            await cluster.list_all(PODS)


async def test_the_refusal_is_reported_when_the_plugin_fails_later(tmp_path: Path) -> None:
    api, plugin = FakeApi(token="first"), Plugin(tmp_path)
    plugin.set_token("first")
    async with connected(api, plugin) as cluster:
        await cluster.list_all(PODS)
        api.token = "second"
        (tmp_path / "token").unlink()
        with pytest.raises(NotAuthenticated, match="rejected the credentials"):
            await cluster.list_all(PODS)
        plugin.set_token("second")
        await cluster.list_all(PODS)


async def test_tokens_do_not_show_in_logs(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig_text("http://127.0.0.1:1", {"token": "a-secret"}))
    async with await KubeClient.connect(kubeconfig=path) as cluster:
        auth = cluster._credentials.auth
        assert "a-secret" in auth.token and "a-secret" not in f"{auth} {auth!r}"
