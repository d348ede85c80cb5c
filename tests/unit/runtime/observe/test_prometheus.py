"""/metrics: names, types and numbers."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.orchestrator.runtime.observe.incidents import KINDS
from holdfast.orchestrator.runtime.observe.prometheus import METRICS, MetricsServer
from holdfast.orchestrator.runtime.observe.view import (
    CheckpointView,
    IncidentCount,
    JobView,
    NodeView,
    PhaseTotal,
    WorkerView,
)

from ..harness import make_job


def make_view() -> JobView:
    workers = [WorkerView(rank=0, state="running", step=9), WorkerView(rank=1, state="hung")]
    node = NodeView(name="node-0", state="member", heartbeat_age_s=0.25, workers=workers)
    counts = [("infrastructure", "worker"), ("infrastructure", "node"), ("resize", "job")]
    incident_counts = [
        IncidentCount(failure_class=name, scope=scope, count=1) for name, scope in counts
    ]
    recovery = {"stop": PhaseTotal(count=2, seconds=0.4), "total": PhaseTotal(count=1, seconds=0.3)}
    return JobView(
        name="tiny", state="running", now_ns=10_000_000_000, step=9, loss=2.5, step_s=0.5,
        tokens_per_s=1024.0, world_size=2, generation=3, restarts={"infrastructure": 2},
        incident_counts=incident_counts, recovery=recovery, steps_lost=2,
        nodes=[node], ledger={"productive": 6.0, "waiting": 4.0},
        goodput=0.6, memory_step=9, commits=1,
        checkpoints=[CheckpointView(step=5, generation=1, num_bytes=77, committed_ns=4 * 10**9)],
    )  # fmt: skip


def scrape(view: JobView, *, per_rank: bool = False) -> dict[tuple[str, tuple[str, ...]], float]:
    """(sample name, label values without the job's) -> value, over HTTP."""
    server = MetricsServer(make_job(metrics={"perRank": per_rank}), lambda: view)
    port = server.open(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    server.close()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job") == "tiny"
            found[sample.name, tuple(labels.values())] = sample.value
    return found


def test_the_metrics_have_the_numbers_of_the_view() -> None:
    found = scrape(make_view())
    expected = {
        ("holdfast_job_steps", ()): 10,
        ("holdfast_job_loss", ()): 2.5,
        ("holdfast_job_state", ("running",)): 1,
        ("holdfast_job_state", ("failed",)): 0,
        ("holdfast_job_nodes", ("member",)): 1,
        ("holdfast_job_workers", ("hung",)): 1,
        ("holdfast_job_restarts_total", ("infrastructure",)): 2,
        ("holdfast_job_restarts_total", ("hang",)): 0,
        ("holdfast_job_incidents_total", ("infrastructure", "worker")): 1,
        ("holdfast_job_incidents_total", ("infrastructure", "node")): 1,
        ("holdfast_job_incidents_total", ("resize", "job")): 1,
        ("holdfast_job_recovery_duration_seconds_count", ("stop",)): 2,
        ("holdfast_job_recovery_duration_seconds_sum", ("stop",)): 0.4,
        ("holdfast_job_recovery_duration_seconds_count", ("total",)): 1,
        ("holdfast_job_steps_lost_total", ()): 2,
        ("holdfast_job_time_seconds", ("waiting",)): 4,
        ("holdfast_goodput_ratio", ()): 0.6,
        ("holdfast_checkpoint_age_seconds", ()): 6,
        ("holdfast_checkpoint_storage_bytes", ()): 77,
        ("holdfast_job_heartbeat_age_seconds", ()): 0.25,
    }
    assert {key: found[key] for key in expected} == expected


def test_every_kind_of_incident_is_counted_from_zero_on() -> None:
    found = scrape(JobView(name="tiny"))
    name = "holdfast_job_incidents_total"
    assert {key: value for key, value in found.items() if key[0] == name} == {
        (name, kind): 0 for kind in KINDS
    }
    after = scrape(make_view())
    assert len([key for key in after if key[0] == name]) == len(KINDS), "none is there twice"


def test_an_incident_of_an_unlisted_kind_is_counted_too() -> None:
    odd = IncidentCount(failure_class="user", scope="node", count=3)
    found = scrape(JobView(name="tiny", incident_counts=[odd]))
    assert found["holdfast_job_incidents_total", ("user", "node")] == 3


def test_without_a_checkpoint_its_age_is_the_time_since_the_first_step() -> None:
    age = ("holdfast_checkpoint_age_seconds", ())
    waiting = JobView(name="tiny", submitted_ns=1_000_000_000, now_ns=90_000_000_000)
    assert age not in scrape(waiting), "nothing is at stake yet"
    training = msgspec.structs.replace(waiting, first_step_s=30.0)
    assert scrape(training)[age] == 59
    committed = CheckpointView(step=5, generation=1, committed_ns=80 * 10**9)
    assert scrape(msgspec.structs.replace(training, checkpoints=[committed]))[age] == 10


def test_series_per_rank_are_opt_in() -> None:
    assert ("holdfast_worker_step", ("node-0", "0")) not in scrape(make_view())
    assert scrape(make_view(), per_rank=True)["holdfast_worker_step", ("node-0", "0")] == 9


def test_unknown_values_have_no_series() -> None:
    names = {name for name, _ in scrape(JobView(name="tiny"))}
    assert "holdfast_job_loss" not in names
    assert "holdfast_model_flops_utilization_ratio" not in names
    assert "holdfast_job_recovery_duration_seconds_count" in names


def test_names_follow_the_conventions() -> None:
    units = ("seconds", "bytes", "ratio", "total", "info", "step", "steps", "size", "nodes")
    for spec in METRICS:
        assert re.fullmatch(r"holdfast_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert "rank" not in spec.labels or spec.per_rank
        if spec.kind == "gauge" and spec.name.rpartition("_")[2] not in units:
            assert spec.name.removeprefix("holdfast_job_") in (
                "state", "generation", "workers", "loss", "holdfast_tokens_per_second",
            )  # fmt: skip


def test_idle_and_half_open_connections_are_closed(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer(make_job(), make_view, limit_s=0.0)
    address = ("127.0.0.1", server.open(0))
    for sent in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(sent)
            assert client.recv(100) == b"", sent
    server.close()
    assert capfd.readouterr().err == ""
