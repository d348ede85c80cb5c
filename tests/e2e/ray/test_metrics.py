"""A job's metrics as Ray's exporter serves them, with their final names."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from helm.ray_dashboard import TARGET
from holdfast.orchestrator.runtime.observe.prometheus import METRICS

from .jobs import Job, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
BOUND_S = 120.0
NOT_HERE = {"ray_holdfast_model_flops_utilization_ratio"}
"""A CPU has no known peak."""
ALWAYS = ("holdfast_job_steps", "holdfast_job_world_size", "holdfast_job_generation")


def exported() -> str:
    """The metrics of all Ray nodes."""
    import ray

    pages = []
    for node in ray.nodes():
        if node["Alive"]:
            place = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            try:
                with urllib.request.urlopen(place, timeout=10) as answer:
                    pages.append(answer.read().decode())
            except OSError:
                continue
    return "\n".join(pages)


def test_rays_exporter_serves_the_jobs_metrics_with_a_prefix(tmp_path: Path) -> None:
    job = Job(tmp_path, "measured", 1_000_000)
    try:
        job.running()
        give_up, page = time.monotonic() + BOUND_S, ""
        size = r'ray_holdfast_job_world_size\{[^}]*job="measured"[^}]*\} 4'
        while time.monotonic() < give_up:
            page = exported()
            if re.search(size, page) and all(f"ray_{name}{{" in page for name in ALWAYS):
                break
            time.sleep(1.0)  # Ray exports periodically, without an event
        names = set(re.findall(r"^(ray_holdfast_\w+)\{", page, re.MULTILINE))
        assert {f"ray_{name}" for name in ALWAYS} <= names
        known = {f"ray_{spec.name}" for spec in METRICS}
        known |= {f"{name}_{part}" for name in known for part in ("sum", "count")}
        # A counter named x_total must not become x_total_total.
        assert names <= known
        ours = [line for line in page.splitlines() if line.startswith("ray_holdfast_job_world")]
        assert re.search(size, page), ours
    finally:
        job.end()


def test_a_restarted_controller_leaves_one_series_of_a_count(tmp_path: Path) -> None:
    job = Job(tmp_path, "counted", 1_000_000)
    series = r'^ray_holdfast_tokens_total\{[^}]*job="counted"[^}]*\} (\S+)$'

    def counts() -> list[float]:
        return [float(one) for one in re.findall(series, exported(), re.MULTILINE)]

    try:
        job.running()
        give_up = time.monotonic() + BOUND_S
        while not (before := counts()):
            assert time.monotonic() < give_up
            time.sleep(1.0)  # Ray exports periodically, without an event
        os.kill(job.controller()["pid"], signal.SIGKILL)
        job.until(lambda view: view.controller_restarts > 0)
        while not (len(after := counts()) == 1 and after[0] > max(before)):
            assert time.monotonic() < give_up, after
            time.sleep(1.0)
        assert re.search(r"ray_holdfast_job_incidents_total\{[^}]*\} 0(\.0)?$", exported(), re.M)
    finally:
        job.end()


def test_the_grafana_dashboard_uses_only_metrics_that_a_job_exports(tmp_path: Path) -> None:
    asked = set(re.findall(r"ray_holdfast_\w+", TARGET.read_text()))
    assert len(asked) > 20
    # Metrics of incidents and checkpoints exist once there is one.
    job = Job(
        tmp_path, "pictured", 1_000_000,
        checkpoint={"path": str(tmp_path / "tier"), "storage": {"everySteps": 10}},
    )  # fmt: skip
    try:
        before = job.running().num_incidents
        done = holdfast("debug", "kill-worker", "pictured", "--ray", job.cluster.address)
        assert done.returncode == 0, done.stderr
        job.incident_after(before)
        job.until(lambda view: bool(view.checkpoints))
        give_up, names = time.monotonic() + BOUND_S, set[str]()
        while time.monotonic() < give_up and not asked - NOT_HERE <= names:
            page = exported()
            names = set(re.findall(r'^(ray_holdfast_\w+)\{[^}]*job="pictured"', page, re.MULTILINE))
            time.sleep(1.0)  # Ray exports periodically, without an event
        assert asked - NOT_HERE <= names, asked - NOT_HERE - names
    finally:
        job.end()
