"""Exports a job's metrics through ray.util.metrics, beside Ray's own.

Ray serves them at every node's metrics port with `ray_` before the name. A counter keeps its name
as given, so `..._total` appears once, and a new process starts with the whole count: Prometheus
sees one counter that goes on.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.orchestrator.runtime.observe.prometheus import METRICS
from holdfast.orchestrator.runtime.observe.view import JobView

SMALLEST = sys.float_info.min
"""Ray refuses an increment of 0. Without one, the series would begin with the first event, and
Prometheus does not count a counter's first value as an increase. Added to a count it is lost."""


class RayMetrics:
    """One Ray metric per name, in one process."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def export(self, job: str, view: JobView) -> None:
        """Every metric that is not per rank. A summary becomes two gauges: Ray would add _total to
        the name of a counter, and everywhere else they are called _sum and _count."""
        for spec in METRICS:
            if spec.per_rank:
                continue
            for labels, value in spec.samples(view):
                given = {"job": job, **{name: labels[name] for name in spec.labels}}
                if spec.kind == "counter":
                    self._count(spec.name, spec.help, given, value)
                else:
                    name = f"{spec.name}_{labels['']}" if spec.kind == "summary" else spec.name
                    self._gauge(name, spec.help, given, value)

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        from ray.util.metrics import Gauge

        self._metric(Gauge, name, text, labels).set(value, tags=labels)

    def _count(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """`value` is the whole count; Ray takes increments."""
        from ray.util.metrics import Counter

        key = name, tuple(sorted(labels.items()))
        metric = self._metric(Counter, name, text, labels)
        if key not in self._counted:
            metric.inc(SMALLEST, tags=labels)
            self._counted[key] = 0.0
        if (more := value - self._counted[key]) > 0:
            metric.inc(more, tags=labels)
            self._counted[key] = value

    def _metric(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description=text, tag_keys=tuple(labels))
        return self._metrics[name]
