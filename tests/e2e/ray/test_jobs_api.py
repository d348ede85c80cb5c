"""Submitting through the Jobs API of a cluster's dashboard, and Ray's own verbs on such a job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..local.rig import spec
from . import rig
from .jobs import BOUND_S, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    cluster = rig.connected()
    from ray.job_submission import JobSubmissionClient

    yield JobSubmissionClient(cluster.dashboard)


def until(client: Any, name: str, statuses: tuple[str, ...]) -> Any:
    give_up = time.monotonic() + BOUND_S
    while time.monotonic() < give_up:
        info = client.get_job_info(name)
        if info.status in statuses:
            return info
        time.sleep(0.2)  # the API cannot be waited on
    raise AssertionError(f"{info}\n{client.get_job_logs(name)}")


def submit(tmp_path: Path, name: str, steps: int, *words: str, **changes: Any) -> Any:
    file = tmp_path / f"{name}.yaml"
    changes = {"checkpoint": {"path": str(tmp_path / name)}} | changes
    file.write_text(yaml.safe_dump(spec(name, steps, **changes)))
    return holdfast("submit", str(file), "--ray", rig.connected().dashboard, *words)


def test_a_submitted_job_shows_in_ray_with_its_metadata_and_trains_to_its_end(
    client: Any, tmp_path: Path
) -> None:
    done = submit(tmp_path, "handed-in", 12)
    assert done.returncode == 0, done.stderr
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    metadata = client.get_job_info(name).metadata
    assert metadata["holdfast_job"] == "handed-in"
    assert metadata["model"] == "pretrain, 1 layers of 32"
    assert metadata["mesh"] == "replicate auto, shard 2"
    assert until(client, name, ("SUCCEEDED", "FAILED", "STOPPED")).status == "SUCCEEDED"
    assert "12 of 12 steps" in client.get_job_logs(name)
    shown = holdfast("status", "handed-in", "--ray", rig.connected().dashboard)
    assert shown.returncode == 0 and "succeeded" in shown.stdout, shown.stderr
    gone = holdfast("delete", "handed-in", "--yes", "--ray", rig.connected().dashboard)
    assert gone.returncode == 0, gone.stderr


def test_stopping_the_ray_job_cancels_the_training_job(client: Any, tmp_path: Path) -> None:
    done = submit(tmp_path, "stopped", 1_000_000)
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    give_up = time.monotonic() + BOUND_S
    while "running" not in client.get_job_logs(name) and time.monotonic() < give_up:
        time.sleep(0.2)
    client.stop_job(name)
    until(client, name, ("STOPPED", "SUCCEEDED", "FAILED"))
    from orchestrator.backends.ray import kv

    while not kv.Keys("stopped").exists(kv.ENDED) and time.monotonic() < give_up:
        time.sleep(0.2)
    shown = holdfast("status", "stopped", "--ray", rig.connected().address)
    assert "cancelled" in shown.stdout, shown.stdout + shown.stderr
    kv.Keys("stopped").clear()


def test_a_runtime_env_that_cannot_be_built_is_told_and_nothing_is_started(
    client: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "env.yaml"
    broken.write_text("py_modules: ['/no/such/directory']\n")
    done = submit(tmp_path, "no-env", 12, "--runtime-env", str(broken), "--follow")
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert "/no/such/directory" in done.stderr
    from orchestrator.backends.ray import kv

    assert "no-env" not in kv.jobs()


def test_a_script_that_did_not_come_along_is_refused_with_its_name(
    client: Any, tmp_path: Path
) -> None:
    document = spec("no-script", 12)
    document["spec"]["entrypoint"] = {"script": "nowhere.py"}
    file = tmp_path / "no-script.yaml"
    file.write_text(yaml.safe_dump(document))
    done = holdfast("submit", str(file), "--ray", rig.connected().dashboard)
    assert done.returncode == 2 and "nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_over_http_says_what_to_do_instead(client: Any, tmp_path: Path) -> None:
    file = tmp_path / "any.yaml"
    file.write_text(yaml.safe_dump(spec("any", 12)))
    done = holdfast("run", str(file), "--ray", rig.connected().dashboard)
    assert done.returncode == 2 and "holdfast submit FILE" in done.stderr
