"""The storage tier in an S3 store: a real server, real agents, and an outage of the server.

Endpoint and credentials are in spec.env only: this process and `holdfast` are started without.
"""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from holdfast.orchestrator.protocol.manifest import directory_name

from ..local.local_rig import Job, holdfast, spec
from .server import BUCKET, KEY, S3, SECRET

pytestmark = pytest.mark.e2e

ENDLESS = 1_000_000
TOKENS_PER_STEP = 4 * 16

Make = Callable[..., Job]


@pytest.fixture
def s3() -> Iterator[S3]:
    server = S3()
    yield server
    server.kill()


@pytest.fixture
def make(tmp_path: Path, s3: S3) -> Iterator[Make]:
    """A job that writes to s3://bucket/<its name>; each `place` is a separate home."""
    jobs: list[Job] = []

    def make(name: str, steps: int, place: str = "a", **storage: Any) -> Job:
        path = f"s3://{BUCKET}/{name}"
        tiers = {"path": path, "storage": storage, "retention": {"keepLast": 2}}
        (tmp_path / place).mkdir()
        document = spec(name, steps, checkpoint=tiers, env=s3.environment)
        jobs.append(Job(tmp_path / place, document))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def test_a_job_writes_to_s3_and_another_run_of_it_goes_on_from_there(make: Make, s3: S3) -> None:
    first = make("s3-twice", 120, everySteps=10)
    first.run()
    view = first.wait()
    assert view.state == "succeeded", first.output()
    # Steps are faster than the store, so some checkpoints are skipped, but never the last one.
    assert view.checkpoints[-1].step == 119
    assert view.commits > len(view.checkpoints) == 2, "older ones are deleted"
    assert view.storage_problem == "" and view.storage_failures == 0
    kept = [directory_name(one.step, 1) for one in view.checkpoints]
    assert s3.steps("s3-twice") == kept
    _read_it_with_the_commands(first, [one.step for one in view.checkpoints])
    _the_secret_is_nowhere_to_be_seen(first)

    second = make("s3-twice", 124, place="b", everySteps=10)
    second.run()
    again = second.wait()
    assert (again.state, again.step) == ("succeeded", 123), second.output()
    assert again.tokens_total == 4 * TOKENS_PER_STEP, "only the steps that were missing"


def _read_it_with_the_commands(job: Job, steps: list[int]) -> None:
    listed = json.loads(holdfast(job, "checkpoint", "list", job.name, "--json").stdout)
    assert [one["step"] for one in listed] == steps
    verified = holdfast(job, "checkpoint", "verify", job.name)
    assert verified.returncode == 0 and "is intact" in verified.stdout, verified.stderr
    target = job.place / "exported"
    exported = holdfast(job, "checkpoint", "export", job.name, str(target))
    assert exported.returncode == 0, exported.stderr
    with safe_open(target / "model.safetensors", framework="np") as file:
        assert len(file.keys()) > 5


def _the_secret_is_nowhere_to_be_seen(job: Job) -> None:
    """The secret is only in files that need it, and only their owner may read these."""
    keepers = set()
    for path in filter(Path.is_file, job.place.rglob("*")):
        if SECRET.encode() in path.read_bytes() or KEY.encode() in path.read_bytes():
            keepers.add(path.name)
            private = path == job.file or stat.S_IMODE(path.stat().st_mode) == 0o600
            assert private, f"{path} can be read by others"
    assert keepers == {"job.yaml", "job.json", "00000001"}
    for verb in (["debug", "events"], ["status"]):
        printed = holdfast(job, *verb, job.name, "--json")
        assert printed.returncode == 0 and SECRET not in printed.stdout + printed.stderr, verb


def test_a_suspended_job_resumes_from_s3(make: Make) -> None:
    job = make("s3-pause", ENDLESS, everySteps=1000)
    job.run()
    job.running(incidents=0)
    assert job.request("suspend").ok
    held = job.until(lambda v: v.state == "suspended")
    (written,) = held.checkpoints
    assert written.step >= held.step
    assert held.nodes == [], "no memory is left to restore from"
    assert job.request("resume").ok
    after = job.until(lambda v: v.state == "running" and v.step > written.step)
    assert after.incidents[-1].restored_from == "storage"
    assert after.incidents[-1].steps_lost == 0


def test_training_and_recovery_go_on_while_the_store_is_unavailable(make: Make, s3: S3) -> None:
    job = make("s3-away", ENDLESS, everySteps=10, finalTimeoutSeconds=3)
    job.run()
    job.until(lambda v: v.commits >= 2)
    s3.kill()
    bad = job.until(lambda v: bool(v.storage_problem))
    assert s3.url in bad.storage_problem, "which endpoint did not answer"
    assert "could not be written" in bad.storage_problem
    printed = " ".join(holdfast(job, "status", job.name).stdout.split())
    assert f"s3://{BUCKET}/s3-away: " in printed and s3.url in printed
    # Neither a new controller nor a dead worker needs the store.
    job.kill(job.command.pid)
    job.command.wait()
    job.attach()
    job.running(incidents=0)
    job.kill(job.worker_pids()[1])
    after = job.running(incidents=1)
    assert after.incidents[-1].restored_from == "memory"
    s3.start()
    healed = job.until(lambda v: not v.storage_problem)
    assert healed.storage_failures > 0
    assert healed.checkpoints[-1].generation == after.generation
    s3.kill()
    job.until(lambda v: bool(v.storage_problem))
    job.command.send_signal(signal.SIGINT)
    assert job.wait().state == "cancelled", "Ctrl-C does not wait longer for the store"
    assert job.processes() == []


def test_the_last_checkpoint_waits_for_an_unavailable_store(make: Make, s3: S3) -> None:
    job = make("s3-wait", 400, everySteps=10)
    job.run()
    job.until(lambda v: v.commits >= 1)
    s3.kill()
    waiting = job.until(lambda v: v.state == "finishing" and bool(v.storage_problem))
    assert waiting.step == 399
    s3.start()
    view = job.wait()
    assert view.state == "succeeded", job.output()
    assert view.storage_problem == ""
    assert s3.steps("s3-wait") == [directory_name(399, view.generation)]


def test_a_store_that_does_not_answer_is_reported_before_anything_starts(
    make: Make, s3: S3
) -> None:
    job = make("s3-dead", 10)
    s3.kill()
    job.run()
    assert job.command.wait() == 2
    assert "spec.checkpoint.path: got s3://bucket/s3-dead" in job.output()
    assert s3.url in job.output()
    assert "Traceback" not in job.output()
    assert not job.directory.path.exists()


def test_a_missing_bucket_is_reported_by_name(make: Make, s3: S3) -> None:
    job = make("s3-nobucket", 10)
    s3.files().rmdir(BUCKET)
    job.run()
    assert job.command.wait() == 2
    assert "spec.checkpoint.path: got s3://bucket/s3-nobucket" in job.output()
    assert "Traceback" not in job.output()
