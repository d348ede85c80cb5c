"""The command line on a Ray cluster, and errors in its use."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import cluster_rig
from .jobs import BOUND_S, Job, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("ray"), "verbs", 1_000_000)
    job.running()
    yield job
    job.end()


def ask(job: Job, *words: str) -> str:
    done = holdfast(*words, "--ray", job.cluster.address)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_is_shown_listed_and_reported_by_name(job: Job) -> None:
    assert "verbs" in ask(job, "status") and "running" in ask(job, "status", "verbs")
    assert json.loads(ask(job, "status", "verbs", "--json"))["world_size"] == 4
    assert re.search("agent joined|launch", ask(job, "debug", "events", "verbs"))
    assert "goodput" in ask(job, "status", "verbs", "--report")


def test_the_logs_of_all_workers_are_found_by_their_rank(job: Job) -> None:
    job.running()
    done = holdfast("logs", "verbs", "--rank", "7", "--ray", job.cluster.address)
    assert done.returncode == 2 and "--rank: got 7; expected one of 0, 1, 2, 3" in done.stderr


def test_an_injected_fault_is_marked_and_recovered(job: Job) -> None:
    before = job.running().num_incidents
    assert "worker 1" in ask(job, "debug", "kill-worker", "verbs", "--rank", "1")
    incident = job.incident_after(before)
    assert incident.rehearsal and incident.steps_lost == 0


def test_a_job_is_suspended_and_resumed(job: Job) -> None:
    ask(job, "suspend", "verbs")
    job.until(lambda view: view.state == "suspended")
    ask(job, "resume", "verbs")
    job.running()


def test_a_name_that_is_taken_is_refused(job: Job) -> None:
    done = holdfast("run", str(job.file), "--ray", job.cluster.address)
    assert done.returncode == 2
    assert "metadata.name: got verbs, which exists in this Ray cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_controller_that_was_removed_is_started_again(job: Job) -> None:
    import ray

    from holdfast.orchestrator.hosts.ray import actor

    step = job.running().step
    ray.kill(actor.find("verbs"), no_restart=True)
    assert job.command.wait(60) == 1
    assert "attach verbs" in job.output.read_text()
    job.attach()
    assert job.until(lambda view: view.controller_alive and view.step > step).generation > 0


def test_an_unknown_job_is_refused_with_the_names_of_all_jobs(job: Job) -> None:
    done = holdfast("status", "unknown", "--ray", job.cluster.address)
    assert done.returncode == 2 and "job: got unknown; expected one of" in done.stderr


def test_a_job_that_the_cluster_has_no_room_for_waits_and_starts_nothing(tmp_path: Path) -> None:
    import ray

    cluster_rig.connected()
    job = Job(tmp_path, "too-large", 10, resources={"cpu": 64})
    try:
        job.events_until("128 CPU")
        view = job.view()
        assert view.state == "pending" and view.generation == 0
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        assert "too-large-node-0" not in names
    finally:
        job.end()


def test_a_job_with_a_capacity_timeout_fails_and_leaves_nothing(tmp_path: Path) -> None:
    import ray

    cluster_rig.connected()
    limit = {"capacityTimeoutSeconds": 5}
    job = Job(tmp_path, "impatient", 10, resources={"cpu": 64}, recovery=limit)
    try:
        assert job.command.wait(BOUND_S) == 1
        output = job.output.read_text()
        assert "recovery.capacityTimeoutSeconds: waited 5 s for nodes: 0 usable" in output
        assert "128 CPU" in output and "Traceback" not in output
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        assert not [name for name in names if "impatient" in name]
    finally:
        job.end()


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = holdfast("status", "--ray", address)
        assert done.returncode == 2
        assert f"--ray: got {address} (Connection refused)" in done.stderr
        done = holdfast("status", "--ray", f"http://{address}")
        assert done.returncode == 2 and f"http://{address}" in done.stderr
        assert "Traceback" not in done.stderr
