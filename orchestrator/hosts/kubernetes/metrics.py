"""The metrics of all jobs of an operator, with the label `namespace`, and the operator's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.orchestrator.runtime.observe.prometheus import (
    METRICS,
    Family,
    Sample,
    build_labels,
    metric_of_jobs,
)
from holdfast.orchestrator.runtime.observe.view import JobPhase, JobView

JobKey = tuple[str, ...]
"""(namespace, name)"""


class OperatorState(NamedTuple):
    """The input of one scrape: collected in the event loop, rendered in a thread."""

    leading: bool
    requests: Mapping[tuple[str, str], int]
    """(verb, resource) -> requests to the API server so far."""
    views: Mapping[JobKey, JobView]
    """Views of the jobs that have a controller here."""
    states: Mapping[JobKey, JobPhase]
    """Phases of all other TrainingJob objects: ended, rejected, suspended, or not started yet."""


def _requests(state: OperatorState) -> Iterator[Sample]:
    for (verb, resource), count in sorted(state.requests.items()):
        yield {"verb": verb, "resource": resource}, float(count)


OPERATOR_METRICS: tuple[Family[OperatorState], ...] = (
    Family(
        "holdfast_build_info",
        "gauge",
        "Always 1.",
        lambda state: [(build_labels(), 1.0)],
        ("version", "python"),
    ),
    Family(
        "holdfast_operator_leader",
        "gauge",
        "1 on the replica that leads, else 0.",
        lambda state: [({}, float(state.leading))],
    ),
    Family(
        "holdfast_operator_jobs",
        "gauge",
        "Jobs with a controller in this replica; 0 on a standby replica.",
        lambda state: [({}, float(len(state.views)))],
    ),
    Family(
        "holdfast_operator_api_requests_total",
        "counter",
        "Requests to the API server by verb and resource; a watch counts when it starts.",
        _requests,
        ("verb", "resource"),
    ),
)
_OPERATOR_NAMES = {metric.name for metric in OPERATOR_METRICS}
JOB_METRICS = tuple(
    spec for spec in METRICS if not spec.per_rank and spec.name not in _OPERATOR_NAMES
)
STATE = "holdfast_job_state"
"""A job without a controller has this metric only, in the one series of its state. So alerts find
the job, and thousands of objects that are never deleted cost little."""


class OperatorCollector(Collector):
    """One scrape."""

    def __init__(self, state: OperatorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        for definition in OPERATOR_METRICS:
            yield metric_of_jobs(definition, (), {(): self._state})
        for spec in JOB_METRICS:
            metric = metric_of_jobs(spec, ("namespace", "job"), self._state.views)
            if spec.name == STATE:
                for (namespace, job), state in self._state.states.items():
                    labels = {"namespace": namespace, "job": job, "state": state}
                    metric.add_sample(STATE, labels, 1.0)
            yield metric


def exposition(state: OperatorState) -> bytes:
    """The text of a scrape. A thousand jobs take a second of a core: not for the event loop."""
    registry = CollectorRegistry()
    registry.register(OperatorCollector(state))
    return generate_latest(registry)
