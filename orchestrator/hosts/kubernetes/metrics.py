"""All jobs' metrics in one exposition, with the operator's own.

Adds the namespace to the metrics of runtime/observe/prometheus.py, and defines the operator's own.
Must not: compute a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

from holdfast.orchestrator.runtime.observe.prometheus import (
    METRICS,
    Family,
    Kind,
    Sample,
    build_labels,
)
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

Name = tuple[str, str]
"""(namespace, name) of a job."""


class OperatorState(NamedTuple):
    """What a scrape says; taken at once, told in a thread."""

    leading: bool
    requests: Mapping[tuple[str, str], int]
    """(verb, resource) -> requests to the API server so far."""
    views: Mapping[Name, JobView]
    """Of the jobs that have a controller here."""
    states: Mapping[Name, JobPhase]
    """Of the others whose objects there are: ended, refused, held, or not taken up yet."""


@dataclass(frozen=True)
class Own:
    """One metric that is not of a job."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[OperatorState], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _requests(facts: OperatorState) -> Iterator[Sample]:
    for (verb, resource), count in sorted(facts.requests.items()):
        yield {"verb": verb, "resource": resource}, float(count)


OWN: tuple[Own, ...] = (
    Own("holdfast_build_info", "gauge", "Always 1.", lambda f: [(build_labels(), 1.0)],
        ("version", "python")),
    Own("holdfast_operator_leader", "gauge", "1 on the replica that leads, else 0.",
        lambda f: [({}, float(f.leading))]),
    Own("holdfast_operator_jobs", "gauge",
        "Jobs with a controller in this replica; 0 on one that stands by.",
        lambda f: [({}, float(len(f.views)))]),
    Own("holdfast_operator_api_requests_total", "counter",
        "Requests to the API server by verb and resource; a watch counts when it begins.",
        _requests, ("verb", "resource")),
)  # fmt: skip
OF_JOBS = tuple(
    spec for spec in METRICS if not spec.per_rank and spec.name not in {own.name for own in OWN}
)
STATE = "holdfast_job_state"
"""Also of a job without a controller, in one series: that of the state that it is in. So an alert
finds it, and thousands of objects that nobody deletes cost little."""


class OperatorCollector(Collector):
    """One scrape."""

    def __init__(self, facts: OperatorState) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        for own in OWN:
            make = CounterMetricFamily if own.kind == "counter" else GaugeMetricFamily
            family = make(own.name, own.help, labels=own.labels)
            for values, number in own.samples(self._facts):
                family.add_metric([values[name] for name in own.labels], number)
            yield family
        for spec in OF_JOBS:
            metric = _family(spec, self._facts.views)
            if spec.name == STATE:
                for (namespace, job), state in self._facts.states.items():
                    labels = {"namespace": namespace, "job": job, "state": state}
                    metric.add_sample(STATE, labels, 1.0)
            yield metric


def _family(spec: Family, views: Mapping[Name, JobView]) -> Metric:
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


def exposition(facts: OperatorState) -> bytes:
    """The page. For a thousand jobs it takes a second of a core: not in the event loop."""
    registry = CollectorRegistry()
    registry.register(OperatorCollector(facts))
    return generate_latest(registry)
