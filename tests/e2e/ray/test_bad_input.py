"""Errors in a job or its cluster: each has a message and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.orchestrator.backends.ray import cluster
from holdfast.orchestrator.errors import UserError

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, Job, Submitted, holdfast

EXAMPLE = Path(__file__).parents[3] / "examples" / "session_loop.py"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def another_version() -> Iterator[str]:
    """The cluster's store names an old Ray version; Ray's own check then refuses this one."""
    address = cluster_rig.connected().address
    from ray.experimental import internal_kv

    key, namespace = b"CLUSTER_METADATA", b"cluster"
    metadata = internal_kv._internal_kv_get(key, namespace=namespace)
    assert metadata is not None
    other = json.loads(metadata) | {"ray_version": "2.9.0"}
    internal_kv._internal_kv_put(key, json.dumps(other).encode(), namespace=namespace)
    yield address
    internal_kv._internal_kv_put(key, metadata, namespace=namespace)


def test_an_address_without_a_listener_is_refused_also_inside_another_cluster() -> None:
    cluster_rig.connected()
    with pytest.raises(UserError, match=r"--ray: got 127\.0\.0\.1:1 "):
        cluster.connect("127.0.0.1:1")


def test_a_cluster_of_another_version_is_refused_with_both_versions(another_version: str) -> None:
    import ray

    done = holdfast("status", "--ray", another_version)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "2.9.0" in done.stderr and ray.__version__ in done.stderr
    assert "expected the same Ray and Python here and in the cluster" in done.stderr


def test_the_heads_address_is_refused_outside_the_cluster_with_addresses_that_work() -> None:
    address = cluster_rig.connected().address
    done = alone("status", "--ray", address)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--ray: got {address} (no Ray node of that cluster runs on this machine)" in done.stderr
    assert "expected http://" in done.stderr and "ray://" in done.stderr


def alone(*words: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine on which no raylet runs: it sees none of the other processes."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("hiding the raylets of this machine needs root and unshare")
    command = [sys.executable, "-m", "holdfast.orchestrator.cli.main", *words]
    return subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["status", "submit"])
@pytest.mark.parametrize("address", [(), ("auto",)], ids=["no-address", "auto"])
def test_auto_is_refused_on_a_machine_without_a_cluster(
    verb: str, address: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where Ray notes the cluster of this machine
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(spec("nowhere", 12, checkpoint={"path": str(tmp_path)})))
    words = {"status": ("status",), "submit": ("submit", str(file))}[verb]
    done = alone(*words, "--ray", *address)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--ray: got auto (" in done.stderr
    assert "`ray status` on the head shows whether it runs" in done.stderr


def test_a_runtime_env_that_the_cluster_cannot_build_is_reported_in_rays_words(
    tmp_path: Path,
) -> None:
    """The env's package was never uploaded. A pip environment would fail the same way, but Ray
    first copies the whole Python environment, which has gigabytes."""
    dashboard = cluster_rig.connected().dashboard
    file, env = tmp_path / "job.yaml", tmp_path / "env.yaml"
    file.write_text(yaml.safe_dump(spec("no-package", 12)))
    package = "gcs://_ray_pkg_0123456789abcdef.zip"
    env.write_text(yaml.safe_dump({"py_modules": [package]}))
    done = holdfast(
        "run", str(file), "--ray", dashboard, "--runtime-env", str(env),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "could not build the job's runtime env, nothing was started" in done.stderr
    assert package in done.stderr
    from holdfast.orchestrator.backends.ray import kv

    assert "no-package" not in kv.jobs()


def test_the_name_of_a_job_that_runs_is_refused_at_submission(tmp_path: Path) -> None:
    job = Submitted(tmp_path, "twice", 1_000_000)
    try:
        job.running()
        done = holdfast("submit", str(job.file), "--ray", job.cluster.dashboard)
        assert done.returncode == 2
        assert "metadata.name: got twice, which Ray job holdfast-twice-" in done.stderr
    finally:
        job.end()


def test_a_script_that_the_nodes_lack_fails_the_job_with_its_name(tmp_path: Path) -> None:
    """The script exists at the start, and is missing for the next generation."""
    place = tmp_path / "beside"
    place.mkdir()
    shutil.copy(EXAMPLE, place / "train.py")
    job = Job(place, "no-script", 1, entrypoint={"script": "train.py", "args": ["1000000"]})
    try:
        job.running()
        assert holdfast("suspend", job.name, "--ray", job.cluster.address).returncode == 0
        job.until(lambda view: view.state == "suspended")
        (place / "train.py").unlink()
        assert holdfast("resume", job.name, "--ray", job.cluster.address).returncode == 0
        view = job.until(lambda view: view.state == "failed")
        assert "train.py" in view.reason, view.reason
        assert job.command.wait(60) == 1
    finally:
        job.end()
        shutil.rmtree(place)


def test_a_job_that_needs_missing_gpus_reports_it_and_waits(tmp_path: Path) -> None:
    job = Job(tmp_path, "no-gpus", 10, resources={"cpu": 1, "gpu": 1})
    try:
        events = job.events_until("GPU")
        view = job.view()
        assert view.state == "pending" and view.generation == 0
        assert "2 CPU + 2 GPU" in events and "0 of 0 GPU" in events
    finally:
        job.end()
