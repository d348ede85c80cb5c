"""Commands over http://: output that is followed, and errors when the server does not answer."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, Job, holdfast, says, started
from .proxies import Relay

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("ray"), "at-home", 1_000_000)
    try:
        job.running()
        yield job
    finally:
        job.end()


def test_a_dashboard_that_goes_away_while_it_is_followed_is_reported(
    job: Job, tmp_path: Path
) -> None:
    with Relay(job.cluster.dashboard) as relay:
        follower = started("logs", job.name, "-f", "--rank", "0", "--ray", relay.url)
        says(follower, r"step \d+ ")
        relay.cut()
        said, _ = follower.communicate(timeout=BOUND_S)
    assert follower.returncode == 1 and "Traceback" not in said
    assert f"the job server at {relay.url} does not answer any more" in said


@pytest.mark.parametrize("websockets", [True, False], ids=["streamed", "without-websockets"])
def test_a_followed_log_is_shown_once_and_as_a_whole(websockets: bool, tmp_path: Path) -> None:
    cluster = cluster_rig.connected()
    from ray.job_submission import JobSubmissionClient

    name = f"followed-{websockets}".lower()
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec(name, 12, checkpoint={"path": str(tmp_path / "here")})))
    with Relay(cluster.dashboard, websockets=websockets) as relay:
        done = holdfast("run", str(file), "--ray", relay.url)
    assert done.returncode == 0, done.stderr
    client = JobSubmissionClient(cluster.dashboard)
    (found,) = [one for one in client.list_jobs() if (one.metadata or {}).get("job_name") == name]
    assert done.stdout == client.get_job_logs(found.submission_id)
    assert "12 of 12 steps" in done.stdout
    gone = holdfast("delete", name, "--yes", "--ray", cluster.address)
    assert gone.returncode == 0, gone.stderr


def test_a_job_is_watched_again_over_http_and_ending_the_watcher_does_not_end_it(job: Job) -> None:
    job.running()
    watcher = started("attach", job.name, "--ray", job.cluster.dashboard)
    says(watcher, r"\d+ of \d+ steps")
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=BOUND_S)
    assert watcher.returncode == 130 and "Traceback" not in said, said
    step = job.view().step
    assert job.until(lambda view: view.step > step + 2).state == "running"


def test_deleting_a_ray_job_that_another_command_has_deleted_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two commands have listed the same Ray jobs, or the dashboard goes away at that moment."""
    cluster = cluster_rig.connected()
    from holdfast.orchestrator.backends.ray import jobs_api

    mine, other = jobs_api.JobsApi(cluster.dashboard), jobs_api.JobsApi(cluster.dashboard)
    prefix = f"cleared-{secrets.token_hex(4)}-"
    faster, slower = (mine.submit(f"{prefix}{number}", "true", {}, {}) for number in range(2))
    assert {mine.wait(name)[0].status for name in (faster, slower)} == {"SUCCEEDED"}
    found = {one.submission_id: one for one in mine._client.list_jobs()}
    other._client.delete_job(faster)
    monkeypatch.setattr(mine._client, "list_jobs", lambda: [found[faster], found[slower]])
    give_up = time.monotonic() + BOUND_S
    while slower in {one.submission_id for one in other._client.list_jobs()}:
        assert time.monotonic() < give_up
        mine.delete_ended(prefix)
        time.sleep(0.5)  # the API has no events
    with Relay(cluster.dashboard) as relay:
        gone = jobs_api.JobsApi(relay.url)
    gone.delete_ended(prefix)


class OtherServer(BaseHTTPRequestHandler):
    """Another HTTP server, or an old Ray."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.answer else 404)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def other_server(answer: bytes) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), type("One", (OtherServer,), {"answer": answer}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"ray_version": "1.8.0"}', "Ray version 1.8.0 is running on the cluster"),
        (
            b'{"ray_version": "2.40.0"}',
            " (a cluster of Ray 2.40.0); expected one of Ray 2.51 or newer",
        ),
        (b"", "Version check returned 404"),
        (b"<html>", "expected the address of a Ray cluster's dashboard"),
        (b"{}", "expected the address of a Ray cluster's dashboard"),
        (b'{"ray_version": "x"}', "expected the address of a Ray cluster's dashboard"),
        (b'{"ray_version": null}', "expected the address of a Ray cluster's dashboard"),
    ],
    ids=["ancient-ray", "old-ray", "no-such-page", "no-json", "no-version", "words", "null"],
)
def test_a_server_that_is_no_dashboard_of_a_supported_ray_is_refused(
    answer: bytes, expected: str
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with other_server(answer) as url:
        done = holdfast("status", "--ray", url)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--ray: got {url}" in done.stderr and expected in done.stderr


def test_an_explicit_address_takes_precedence_over_the_environment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own client would use RAY_ADDRESS."""
    with other_server(b"") as url:
        monkeypatch.setenv("RAY_ADDRESS", url)
        done = holdfast("status", job.name, "--ray", job.cluster.dashboard)
        assert done.returncode == 0 and job.name in done.stdout, done.stderr
        done = holdfast("status", job.name, "--ray")
        assert done.returncode == 2 and f"--ray: got {url}" in done.stderr


def test_without_an_address_the_environments_is_used(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", job.cluster.address)
    for words in (("status", job.name, "--ray"), ("status", "--ray", "--json", job.name)):
        done = holdfast(*words)
        assert done.returncode == 0 and job.name in done.stdout, done.stderr
