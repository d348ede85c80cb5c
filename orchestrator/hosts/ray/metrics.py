"""Exports a job's metrics through ray.util.metrics, beside Ray's own.

Ray serves them at every node's metrics port with `ray_` before the name, and adds the id of the
worker that exports them. Counters are gauges here that hold the whole count: Ray drops the gauge of
a dead worker (after two of its export intervals) and never drops its counter, so a
restarted controller would leave two series of one job. Prometheus' functions do not look at the
type; increase() and rate() work.
"""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from holdfast.orchestrator.runtime.observe.view import JobView


class RayMetrics:
    """One Ray metric per name, in one process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def export(self, job: str, view: JobView) -> None:
        """Every metric that is not per rank. A summary becomes two metrics, called _sum and _count
        as everywhere else."""
        for spec in METRICS:
            if spec.per_rank:
                continue
            for labels, value in spec.samples(view):
                tags = {"job": job, **{name: labels[name] for name in spec.labels}}
                name = f"{spec.name}_{labels['']}" if spec.kind == "summary" else spec.name
                self._metric(name, spec.help, tags).set(value, tags=tags)

    def _metric(self, name: str, text: str, labels: dict[str, str]) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._metrics:
            self._metrics[name] = Gauge(name, description=text, tag_keys=tuple(labels))
        return self._metrics[name]
