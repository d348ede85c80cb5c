"""A cluster with token authentication, Ray's default from 2.61: a job trains and is asked over both
addresses with the token; without it every command names it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ..local.local_rig import spec
from .headed_cluster import HeadedCluster
from .jobs import BOUND_S, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
NAME = "authenticated"
TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadedCluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    cluster = HeadedCluster(nodes=1, dashboard=True)
    yield cluster
    cluster.close()


def asked(*words: str) -> str:
    done = holdfast(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_runs_with_the_token_and_a_missing_one_is_named(
    cluster: HeadedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.yaml"
    size = {"nodes": {"min": 1, "max": 1}, "workersPerNode": 1, "parallelism": {}}
    file.write_text(yaml.safe_dump(spec(NAME, 1_000_000, **size)))
    assert f"holdfast status {NAME}" in asked("submit", str(file), "--ray", cluster.dashboard)
    give_up = time.monotonic() + 4 * BOUND_S  # Ray, and torch in an agent, have to start
    while True:
        done = holdfast("status", NAME, "--json", "--ray", cluster.address)
        if done.returncode == 0 and json.loads(done.stdout)["step"] > 0:
            break
        assert time.monotonic() < give_up, done.stdout + done.stderr
        time.sleep(0.5)
    shown = json.loads(asked("status", NAME, "--json", "--ray", cluster.dashboard))
    assert shown["state"] == "running"
    assert "submitted" in asked("debug", "events", NAME, "--ray", cluster.dashboard)
    with monkeypatch.context() as patched:
        patched.delenv("RAY_AUTH_TOKEN")
        patched.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
        for mode in ("disabled", "token"):
            patched.setenv("RAY_AUTH_MODE", mode)
            for address in (cluster.address, cluster.dashboard):
                done = holdfast("status", NAME, "--ray", address)
                assert done.returncode == 2 and not done.stdout, (mode, address)
                assert re.search("RAY_AUTH_TOKEN|Authentication token", done.stderr), done.stderr
                assert "Traceback" not in done.stderr
    assert "stopping all workers" in asked("cancel", NAME, "--ray", cluster.dashboard)
