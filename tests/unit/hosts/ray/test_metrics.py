"""Metrics of a job as Ray's exporter gets them."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.hosts.ray.metrics import SMALLEST, RayMetrics
from holdfast.orchestrator.runtime.observe.view import IncidentCount, JobView


def test_a_counter_starts_near_zero_and_counts_an_incident_once() -> None:
    increments: list[tuple[str, dict[str, str], float]] = []

    class Series:
        def __init__(self, name: str) -> None:
            self.name = name

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses it"
            increments.append((self.name, tags, value))

        def set(self, value: float, tags: dict[str, str]) -> None:
            increments.append((self.name, tags, value))

    class RecordingMetrics(RayMetrics):
        """Records what Ray would get."""

        def _metric(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
            return Series(name)

    metrics, tags = RecordingMetrics(), {"job": "tiny", "class": "hang", "scope": "worker"}
    hang = IncidentCount(failure_class="hang", scope="worker", count=1)
    hung = JobView(name="tiny", incident_counts=[hang])
    for view in (JobView(name="tiny"), hung, hung):
        metrics.export("tiny", view)
    counted = [
        (labels, value)
        for name, labels, value in increments
        if name == "holdfast_job_incidents_total" and labels["class"] == "hang"
    ]
    assert [value for labels, value in counted if labels == tags] == [SMALLEST, 1.0]
    assert len(counted) == 3, "the series of the other scope exists, too"
