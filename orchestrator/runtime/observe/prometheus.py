"""The /metrics endpoint: a JobView in Prometheus' text format.

One table holds all names, types and labels; docs/operations/metrics.md is generated from it. All
numbers come from the view, so a counter survives its controller and agrees with the report.

Naming: https://prometheus.io/docs/practices/naming/ (base units, `_total` for counters). Labels are
few and bounded; series per rank only when spec.metrics.perRank asks for them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol.strangers import GuardedHttpServer, GuardedRequest

from ..agent_server import cannot_listen
from .incidents import KINDS
from .view import JobPhase, JobView, NodeState, PhaseTotal

NS = 1e9
ADDRESS = "127.0.0.1"
Kind = Literal["gauge", "counter", "summary"]
Sample = tuple[Mapping[str, str], float]
"""Labels and value."""
CLASSES = ("user", "infrastructure", "preemption", "hang")
PHASES = ("detect", "stop", "place", "launch", "first-step", "total")


Seen = TypeVar("Seen")
"""Source of a metric: a JobView, or an operator's knowledge of itself."""


@dataclass(frozen=True)
class Family(Generic[Seen]):
    """One metric. `name` as scraped (counters with _total)."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[Seen], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    per_rank: bool = False


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [({}, float(value))]


def _states(view: JobView) -> Iterator[Sample]:
    for state in get_args(JobPhase):
        yield {"state": state}, float(view.state == state)


def _nodes(view: JobView) -> Iterator[Sample]:
    for state in get_args(NodeState):
        yield {"state": state}, float(sum(node.state == state for node in view.nodes))


def _workers(view: JobView) -> Iterator[Sample]:
    for state in ("starting", "running", "suspect", "hung", "exited"):
        count = sum(worker.state == state for node in view.nodes for worker in node.workers)
        yield {"state": state}, float(count)


def _restarts(view: JobView) -> Iterator[Sample]:
    for name in CLASSES:
        yield {"class": name}, float(view.restarts.get(name, 0))


def _incidents(view: JobView) -> Iterator[Sample]:
    """Samples from 0 on: what a series begins with is no increase for Prometheus, and an alert on
    it would miss the first of each kind."""
    counts = dict.fromkeys(KINDS, 0)
    counts |= {(c.failure_class, c.scope): c.count for c in view.incident_counts}
    for (name, scope), count in counts.items():
        yield {"class": name, "scope": scope}, float(count)


def _recoveries(view: JobView) -> Iterator[Sample]:
    """Count and sum by phase: what a summary without quantiles holds."""
    for phase in PHASES:
        total = view.recovery.get(phase, PhaseTotal(count=0, seconds=0.0))
        yield {"phase": phase, "": "count"}, float(total.count)
        yield {"phase": phase, "": "sum"}, total.seconds


def _first_step(view: JobView) -> list[Sample]:
    return _one(view.first_step_s)


def _age(view: JobView) -> list[Sample]:
    """Age of the newest state in storage, also before the first commit; no sample before the first
    step."""
    since = [checkpoint.committed_ns for checkpoint in view.checkpoints]
    if not since and view.first_step_s is not None:
        since = [view.submitted_ns + round(view.first_step_s * NS)]
    return _one((view.now_ns - max(since)) / NS) if since else []


def _beats(view: JobView) -> list[Sample]:
    """The oldest: one series however many nodes there are."""
    ages = [n.heartbeat_age_s for n in view.nodes if n.heartbeat_age_s is not None]
    return _one(max(ages)) if ages else []


def _rank_steps(view: JobView) -> Iterator[Sample]:
    for node in view.nodes:
        for worker in node.workers:
            yield {"node": node.name, "rank": str(worker.rank)}, float(worker.step)


def _planned(view: JobView, name: str) -> list[Sample]:
    return _one(getattr(view.planned, name)) if view.planned is not None else []


def _plan_errors(view: JobView) -> Iterator[Sample]:
    plan = view.planned
    if plan is None:
        return
    if view.device_memory_peak_bytes:
        yield {"of": "memory"}, plan.device_memory_bytes / view.device_memory_peak_bytes - 1
    if plan.step_s is not None and view.step_s:
        yield {"of": "step"}, plan.step_s / view.step_s - 1
    if plan.sent_bytes and view.sent_bytes:
        yield {"of": "sent"}, plan.sent_bytes / view.sent_bytes - 1


def build_labels() -> dict[str, str]:
    """Labels of holdfast_build_info."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return {"version": limits.RELEASE, "python": python}


METRICS: tuple[Family[JobView], ...] = (
    Family("holdfast_build_info", "gauge", "Always 1.", lambda v: [(build_labels(), 1.0)],
         ("version", "python")),
    Family("holdfast_job_state", "gauge", "1 for the state the job is in, else 0.", _states,
         ("state",)),
    Family("holdfast_job_generation", "gauge", "Launches of a membership so far.",
         lambda v: _one(v.generation)),
    Family("holdfast_job_world_size", "gauge", "Workers of the current generation.",
         lambda v: _one(v.world_size)),
    Family("holdfast_job_nodes", "gauge", "Nodes by state.", _nodes, ("state",)),
    Family("holdfast_job_workers", "gauge", "Workers by state.", _workers, ("state",)),
    Family("holdfast_job_heartbeat_age_seconds", "gauge",
         "Time since the heartbeat of the node that has been silent longest.", _beats),
    Family("holdfast_job_submit_to_first_step_seconds", "gauge",
         "From submission to the first step of all ranks.", _first_step),
    Family("holdfast_job_steps", "gauge", "Steps that the model has behind it; falls after a loss.",
         lambda v: _one(v.step + 1)),
    Family("holdfast_job_loss", "gauge", "Training loss of the last step.", lambda v: _one(v.loss)),
    Family("holdfast_step_duration_seconds", "gauge", "Median time of the recent steps.",
         lambda v: _one(v.step_s or None)),
    Family("holdfast_tokens_per_second", "gauge", "Tokens of the global batch over the step time.",
         lambda v: _one(v.tokens_per_s or None)),
    Family("holdfast_tokens_total", "counter", "Tokens trained on, steps done twice counted twice.",
         lambda v: _one(v.tokens_total)),
    Family("holdfast_model_flops_utilization_ratio", "gauge",
         "MFU, 0 to 1, where the peak of the device is known.", lambda v: _one(v.mfu)),
    Family("holdfast_device_memory_peak_bytes", "gauge",
         "Most memory used on any device; of a job on CPUs, what any worker grew by.",
         lambda v: _one(v.device_memory_peak_bytes or None)),
    Family("holdfast_planned_device_memory_bytes", "gauge",
         "Peak of a worker's device as the planner predicts it.",
         lambda v: _planned(v, "device_memory_bytes")),
    Family("holdfast_planned_step_seconds", "gauge",
         "Time of a step as the planner predicts it, where the device is in the catalogue.",
         lambda v: _planned(v, "step_s")),
    Family("holdfast_sent_bytes", "gauge",
         "Bytes that a rank sends in the collectives of a step, where they are known.",
         lambda v: _one(v.sent_bytes or None)),
    Family("holdfast_planned_sent_bytes", "gauge",
         "Bytes that one rank sends in a step, as the planner predicts it.",
         lambda v: _planned(v, "sent_bytes")),
    Family("holdfast_plan_error_ratio", "gauge",
         "Predicted over measured, less 1: peak device memory, step time, bytes sent.",
         _plan_errors, ("of",)),
    Family("holdfast_goodput_ratio", "gauge",
         "Productive time over time since the first launch, 0 to 1.", lambda v: _one(v.goodput)),
    # No counter: what training time has bought is known only when steps are reported, and a
    # counter that falls looks like a restart.
    Family("holdfast_job_time_seconds", "gauge",
         "Time since submission by cause; lost steps move from productive to their cause.",
         lambda v: [({"cause": cause}, seconds) for cause, seconds in v.ledger.items()],
         ("cause",)),
    Family("holdfast_job_restarts_total", "counter",
         "Restarts charged to a budget, by failure class.", _restarts, ("class",)),
    Family("holdfast_job_incidents_total", "counter",
         "Interruptions by class (resize and suspend too) and by what was lost.", _incidents,
         ("class", "scope")),
    Family("holdfast_job_recovery_duration_seconds", "summary",
         "Duration of interruptions by phase, from the fault to the next step of all ranks.",
         _recoveries, ("phase",)),
    Family("holdfast_job_steps_lost_total", "counter", "Finished steps that were trained again.",
         lambda v: _one(v.steps_lost)),
    Family("holdfast_checkpoint_stall_seconds", "gauge",
         "Time that the last staging blocked the training loop.",
         lambda v: _one(v.stall_s if v.step_s else None)),
    Family("holdfast_checkpoint_thrown_away_steps", "gauge",
         "Most staged steps that a rank discarded because a tensor changed during the copy.",
         lambda v: _one(v.copies_thrown_away or None)),
    Family("holdfast_checkpoint_memory_interval_steps", "gauge",
         "Steps between two stagings in memory; 0: never.",
         lambda v: _one(v.stage_every_steps)),
    Family("holdfast_checkpoint_memory_step", "gauge",
         "Newest step complete in the memory of the nodes; -1: none.",
         lambda v: _one(v.memory_step)),
    Family("holdfast_checkpoint_buddy_step", "gauge",
         "Newest step of which all buddy nodes hold a copy; -1: none, or none is needed.",
         lambda v: _one(v.copied_step)),
    Family("holdfast_checkpoint_storage_step", "gauge", "Newest step committed to storage.",
         lambda v: _one(max((c.step for c in v.checkpoints), default=None))),
    Family("holdfast_checkpoint_storage_bytes", "gauge", "Size of the newest committed checkpoint.",
         lambda v: _one(v.checkpoints[-1].num_bytes if v.checkpoints else None)),
    Family("holdfast_checkpoint_durable_seconds", "gauge",
         "Longest write of a shard of the newest checkpoint, from memory to durable.",
         lambda v: _one(v.durable_s or None)),
    Family("holdfast_checkpoint_commits_total", "counter", "Manifests committed.",
         lambda v: _one(v.commits)),
    Family("holdfast_checkpoint_failures_total", "counter",
         "Shards and manifests that could not be written to storage.",
         lambda v: _one(v.storage_failures)),
    Family("holdfast_checkpoint_skipped_total", "counter",
         "Shards skipped because an older one was still being written.",
         lambda v: _one(v.storage_skipped)),
    Family("holdfast_checkpoint_age_seconds", "gauge",
         "Time since the newest checkpoint in storage, or since the first step.", _age),
    Family("holdfast_controller_restarts_total", "counter", "Times that a controller took over.",
         lambda v: _one(v.controller_restarts)),
    Family("holdfast_worker_step", "gauge", "Last step finished by a rank.", _rank_steps,
         ("node", "rank"), per_rank=True),
)  # fmt: skip


class JobCollector(Collector):
    """All metrics of one job; `view` is called at every scrape, from the server's thread."""

    def __init__(self, job: TrainingJob, view: Callable[[], JobView]) -> None:
        self._job, self._view = job, view

    def describe(self) -> list[Metric]:
        # Otherwise the registry would scrape once for the names, before there is a view.
        return []

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        for spec in METRICS:
            if not spec.per_rank or self._job.spec.metrics.per_rank:
                yield metric_of_jobs(spec, ("job",), {(self._job.name,): view})


def metric_of_jobs(
    spec: Family[Seen], job_labels: tuple[str, ...], views: Mapping[tuple[str, ...], Seen]
) -> Metric:
    """One metric of jobs. `views`: by the values of `job_labels`."""
    names = [*job_labels, *spec.labels]
    if spec.kind == "summary":
        summary = SummaryMetricFamily(spec.name, spec.help, labels=names)
        for job, view in views.items():
            samples = list(spec.samples(view))
            for key in dict.fromkeys(labels["phase"] for labels, _ in samples):
                values = {labels[""]: value for labels, value in samples if labels["phase"] == key}
                summary.add_metric([*job, key], int(values["count"]), values["sum"])
        return summary
    make = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = make(spec.name, spec.help, labels=names)
    for job, view in views.items():
        for labels, value in spec.samples(view):
            family.add_metric([*job, *(labels[name] for name in spec.labels)], value)
    return family


class MetricsServer:
    """Serves /metrics of one job on this machine."""

    def __init__(
        self,
        job: TrainingJob,
        view: Callable[[], JobView],
        limit_s: float = limits.GREETING_TIMEOUT_S,
    ) -> None:
        """A request and its answer may each take `limit_s`."""
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(job, view))
        self._limit_s = limit_s

    def open(self, port: int) -> int:
        """Listen; returns the port. Raises UserError when it cannot be opened."""

        class Scrape(GuardedRequest, MetricsHandler):
            registry = self._registry

        try:
            self._server = GuardedHttpServer((ADDRESS, port), Scrape, self._limit_s)
        except OSError as error:
            raise cannot_listen("spec.metrics.port", ADDRESS, port, error) from None
        self._server.serve_in_thread("holdfast-metrics")
        return self._server.port

    def close(self) -> None:
        """Stop, without waiting for the server's thread, which polls twice a second."""
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
