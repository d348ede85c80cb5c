"""All jobs' metrics in one exposition, with the operator's own.

Owns: adding the namespace to what runtime/metrics.py says of one job. Must not: compute a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from ..runtime.metrics import METRICS, Spec
from ..runtime.view import JobView

Jobs = Mapping[tuple[str, str], JobView]
"""(namespace, name) -> view, of the jobs that have a controller here."""


class Facts(NamedTuple):
    """What a scrape says; taken at once, told in a thread."""

    leading: bool
    requests: Mapping[tuple[str, str], int]
    """(verb, resource) -> requests to the API server so far."""
    views: Jobs


class OperatorCollector(Collector):
    """One scrape."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        leading = GaugeMetricFamily("holdfast_operator_leader", "1 on the replica that leads.")
        leading.add_metric([], float(self._facts.leading))
        yield leading
        requests = CounterMetricFamily(
            "holdfast_operator_api_requests",
            "Requests to the API server by verb and resource; a watch counts when it begins.",
            labels=["verb", "resource"],
        )
        for (verb, resource), count in sorted(self._facts.requests.items()):
            requests.add_metric([verb, resource], float(count))
        yield requests
        views = self._facts.views
        hosted = GaugeMetricFamily("holdfast_operator_jobs", "Jobs with a controller here.")
        hosted.add_metric([], float(len(views)))
        yield hosted
        for spec in METRICS:
            if not spec.per_rank and spec.name != "holdfast_build_info":
                yield _family(spec, views)


def _family(spec: Spec, views: Jobs) -> Metric:
    labels = ["namespace", "job", *spec.labels]
    if spec.kind == "summary":
        summary = SummaryMetricFamily(spec.name, spec.help, labels=labels)
        for where, view in views.items():
            samples = list(spec.samples(view))
            for phase in dict.fromkeys(one["phase"] for one, _ in samples):
                found = {one[""]: value for one, value in samples if one["phase"] == phase}
                summary.add_metric([*where, phase], int(found["count"]), found["sum"])
        return summary
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=labels)
    for where, view in views.items():
        for values, number in spec.samples(view):
            family.add_metric([*where, *(values[name] for name in spec.labels)], number)
    return family


def exposition(facts: Facts) -> bytes:
    """The page. For a thousand jobs it takes a second of a core: not in the event loop."""
    registry = CollectorRegistry()
    registry.register(OperatorCollector(facts))
    return generate_latest(registry)
