"""Numbers of a job beside Ray's own, through ray.util.metrics.

Owns: one Ray metric per name, and counters as differences. Must not: know what the numbers mean.

Ray exports them at every node's metrics port with `ray_` before the name. A counter keeps its name
as given, so `..._total` comes out once, and a new process begins with the whole of it: what
Prometheus sees is a counter that goes on where it was.
"""

from __future__ import annotations

import sys
from typing import Any

NEARLY_NOTHING = sys.float_info.min
"""Ray refuses an increment of 0. Without one the series would begin with the first event, and what
a counter begins with is not an increase for Prometheus. Added to any count it changes nothing."""


class RayMetrics:
    """Of one process."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        from ray.util.metrics import Gauge

        self._metric(Gauge, name, text, labels).set(value, tags=labels)

    def counter(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """`value` is the whole count."""
        from ray.util.metrics import Counter

        key = name, tuple(sorted(labels.items()))
        metric = self._metric(Counter, name, text, labels)
        if key not in self._counted:
            metric.inc(NEARLY_NOTHING, tags=labels)
            self._counted[key] = 0.0
        if (more := value - self._counted[key]) > 0:
            metric.inc(more, tags=labels)
            self._counted[key] = value

    def _metric(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self._known:
            self._known[name] = kind(name, description=text, tag_keys=tuple(labels))
        return self._known[name]
