"""One trace for each incident, with its phases as spans. Needs the extra `otel`."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest

from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.runtime.observe import incident_traces
from holdfast.orchestrator.runtime.observe.incident_traces import IncidentTraces, of_environment
from holdfast.orchestrator.runtime.observe.projection import JobProjection
from holdfast.orchestrator.runtime.observe.view import Incident
from tests.sim.run_seed import play

WHY = "opentelemetry-sdk is not installed (extra `otel`)"


def followed(seed: int, traces: IncidentTraces) -> tuple[JobState, list[Incident], set[int]]:
    """Exports the incidents of a simulated job as a controller does, after each event. Returns its
    last state, all incidents, and those that were over before the job was."""
    world = play(seed)
    job = world.host.job
    controller, projection, over = Controller(None, job), JobProjection(job), set[int]()
    for now_ns, event in world.host.history():
        projection.observe(now_ns, event, controller.step(now_ns, event), controller.state)
        incidents = projection.view(now_ns, live=False).incidents
        traces.observe(controller.state, lambda found=incidents: found)  # type: ignore[misc]
        if not controller.state.terminal:
            over |= {one.number for one in incidents if "total" in one.seconds}
    return controller.state, incidents, over


def test_each_incident_is_one_trace_whose_spans_are_its_phases() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=WHY)
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    _, over, before = followed(3, IncidentTraces(provider.get_tracer("test"), "team/llm"))
    assert len(before) > 1, "some are over before the job is"
    spans = kept.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert [span.attributes["holdfast.incident"] for span in roots] == [n.number for n in over]
    assert len({span.context.trace_id for span in roots}) == len(roots)
    for root, one in zip(roots, over, strict=True):
        inside = [s for s in spans if s.parent and s.parent.span_id == root.context.span_id]
        phases = [name for name in one.seconds if name != "total"]
        assert [span.name for span in inside] == phases
        assert root.start_time == one.at_ns and root.attributes["holdfast.job"] == "team/llm"
        for before, after in pairwise(inside):
            assert before.end_time == after.start_time
        for span in inside:
            assert (span.end_time - span.start_time) / 1e9 == pytest.approx(one.seconds[span.name])
        if "total" in one.seconds:
            assert (root.end_time - root.start_time) / 1e9 == pytest.approx(one.seconds["total"])


def test_a_controller_that_takes_over_exports_no_incident_twice() -> None:
    class Refusing:
        """A tracer that must not be used."""

        def start_span(self, name: str, **more: object) -> None:
            raise AssertionError(name)

    class Counting(IncidentTraces):
        """Exports nothing."""

        def _export(self, one: Incident) -> None:
            numbers.append(one.number)

    numbers: list[int] = []
    state, incidents, _ = followed(3, Counting(None, "job"))
    assert numbers == [one.number for one in incidents]
    traces = IncidentTraces(Refusing(), "job")
    traces.begin(state, incidents)
    traces.observe(state, lambda: incidents)


SEND = """
from holdfast.orchestrator.runtime.observe.incident_traces import of_environment
from holdfast.orchestrator.runtime.observe.view import Incident
class State:
    num_incidents, terminal = 1, False
one = Incident(number=1, at_ns=10**18, failure_class="hang", title="rank 1 stopped",
               seconds={"stop": 0.5, "first-step": 1.0, "total": 1.5})
of_environment("llm").observe(State(), lambda: [one])
"""


def test_a_real_collector_gets_the_trace_before_the_process_exits() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=WHY)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        """Takes what is posted."""

        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        subprocess.run(
            [sys.executable, "-c", SEND], check=True, timeout=120,
            env={**_environment(), "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"},
        )  # fmt: skip
    finally:
        server.shutdown()
    ((path, body),) = got
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert service == "holdfast" and names == ["stop", "first-step", "incident: hang"]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    incident_traces._tracer.cache_clear()
    for name in (*incident_traces.ENDPOINTS, "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_nothing_is_exported_unless_an_endpoint_is_set(fresh: pytest.MonkeyPatch) -> None:
    assert of_environment("job") is None
    assert "opentelemetry" not in sys.modules or incident_traces._tracer.cache_info().misses == 0


@pytest.mark.parametrize(
    ("protocol", "said"),
    [("grpc", "got grpc; expected http/protobuf"), ("http/protobuf", "pip install '.[otel]'")],
)
def test_what_cannot_be_exported_is_said_once_by_name(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: str, said: str
) -> None:
    fresh.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    fresh.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    fresh.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert of_environment("job") is None and of_environment("other") is None
    assert [said in record.getMessage() for record in caplog.records] == [True]
    incident_traces._tracer.cache_clear()
