"""Metrics of a job as Ray's exporter gets them."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.hosts.ray.metrics import RayMetrics
from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from holdfast.orchestrator.runtime.observe.view import IncidentCount, JobView


class RecordingMetrics(RayMetrics):
    """Records what Ray would get."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[str, dict[str, str], float]] = []

    def _metric(self, name: str, text: str, labels: dict[str, str]) -> Any:
        samples = self.samples

        class Series:
            def set(self, value: float, tags: dict[str, str]) -> None:
                samples.append((name, tags, value))

        return Series()


def test_a_counter_starts_at_zero_and_holds_the_whole_count() -> None:
    metrics, tags = RecordingMetrics(), {"job": "tiny", "class": "hang", "scope": "worker"}
    hang = IncidentCount(failure_class="hang", scope="worker", count=1)
    hung = JobView(name="tiny", incident_counts=[hang])
    for view in (JobView(name="tiny"), hung, hung):
        metrics.export("tiny", view)
    counted = [one for one in metrics.samples if one[0] == "holdfast_job_incidents_total"]
    assert [value for _, labels, value in counted if labels == tags] == [0.0, 1.0, 1.0]


def test_a_restarted_controller_exports_the_same_counts_and_exact_zeros() -> None:
    """Ray adds the id of the worker: as a counter, the series of the dead controller would stay."""
    view = JobView(name="tiny", tokens_total=512)
    before, after = RecordingMetrics(), RecordingMetrics()
    before.export("tiny", view)
    after.export("tiny", view)
    assert before.samples == after.samples
    exported = {name for name, _, _ in after.samples}
    assert {
        spec.name for spec in METRICS if spec.kind == "counter" and not spec.per_rank
    } & exported
    assert all(value == 0 or abs(value) > 1e-9 for _, _, value in after.samples)


def test_all_metrics_are_gauges_which_ray_drops_with_the_worker_that_set_them() -> None:
    import ray.util.metrics

    metrics = RayMetrics()
    made = metrics._metric("holdfast_tokens_total", "Tokens.", {"job": "tiny"})
    assert type(made) is ray.util.metrics.Gauge
