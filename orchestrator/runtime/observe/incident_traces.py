"""One OpenTelemetry trace for each incident: its phases are spans. An optional extra.

Exported over OTLP by the controller when OTEL_EXPORTER_OTLP_ENDPOINT is set, in the background. An
incident is exported once, when it is over, the next one has begun, or the job has ended. What was
over before this controller began was exported by an earlier one.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.errors import installation

from .view import Incident

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOL = "http/protobuf"
_SECOND_NS = 10**9
_PHASES = ("detect", "stop", "place", "launch", "first-step")

log = logging.getLogger("holdfast")


class IncidentTraces:
    """Exports the incidents of one job."""

    def __init__(self, tracer: Any, job: str) -> None:
        """`tracer`: of an opentelemetry.trace.TracerProvider."""
        self._tracer, self._job = tracer, job
        self._through = 0
        """Number of the last incident that was exported, or was over before."""

    def begin(self, state: JobState, incidents: Sequence[Incident]) -> None:
        """A controller starts with these incidents."""
        self._through = max((n.number for n in incidents if _is_over(n, state)), default=0)

    def observe(self, state: JobState, incidents: Callable[[], Sequence[Incident]]) -> None:
        """Export what has come to its end. `incidents` is called only if there may be any."""
        if state.num_incidents <= self._through:
            return
        for incident in incidents():
            if incident.number > self._through and _is_over(incident, state):
                self._through = incident.number
                self._export(incident)

    def _export(self, one: Incident) -> None:
        from opentelemetry import trace

        # Of a script that shows no progress it is unknown.
        unknown = one.no_steps and "launch" in one.seconds
        recovered = "total" in one.seconds or (None if unknown else False)
        labels = {
            "holdfast.job": self._job,
            "holdfast.incident": one.number,
            "holdfast.class": one.failure_class,
            "holdfast.title": one.title,
            "holdfast.decision": one.decision,
            "holdfast.rehearsal": one.rehearsal,
            "holdfast.culprit.node": one.culprit_node or None,
            "holdfast.culprit.rank": one.culprit_rank,
            "holdfast.generation.before": one.generation_before,
            "holdfast.generation.after": one.generation_after,
            "holdfast.world_size.before": one.world_size_before,
            "holdfast.world_size.after": one.world_size_after,
            "holdfast.restored_from": one.restored_from or None,
            "holdfast.steps_lost": one.steps_lost,
            "holdfast.recovered": recovered,
        }
        attributes = {name: value for name, value in labels.items() if value is not None}
        # A context without a span: the trace is its own.
        root = self._tracer.start_span(
            f"incident: {one.failure_class}",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            start_time=one.at_ns,
            attributes=attributes,
        )
        inside, at_ns = trace.set_span_in_context(root), one.at_ns
        for phase in _PHASES:
            if phase in one.seconds:
                span = self._tracer.start_span(
                    phase, context=inside, start_time=at_ns, attributes={"holdfast.job": self._job}
                )
                at_ns += round(one.seconds[phase] * _SECOND_NS)
                span.end(end_time=at_ns)
        root.end(end_time=at_ns)


def _is_over(one: Incident, state: JobState) -> bool:
    return "total" in one.seconds or one.number < state.num_incidents or state.terminal


def of_environment(job: str) -> IncidentTraces | None:
    """Traces for a job, if the environment of this process asks for traces. None, with a warning,
    if they cannot be exported."""
    tracer = _tracer() if any(os.environ.get(name) for name in ENDPOINTS) else None
    return None if tracer is None else IncidentTraces(tracer, job)


@functools.cache
def _tracer() -> Any:
    """One provider for each process: it owns a thread. It is flushed when the process exits."""
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    chosen = os.environ.get(name) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if chosen != _PROTOCOL:
        log.warning(
            "OTEL_EXPORTER_OTLP_PROTOCOL: got %s; expected %s; incidents are not exported as "
            "traces", chosen, _PROTOCOL,
        )  # fmt: skip
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "%s is set, and incidents are not exported as traces: %s; %s",
            ENDPOINTS[0], error, installation("otel"),
        )  # fmt: skip
        return None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "holdfast"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("holdfast")
