"""Generates docs/operations/metrics.md: `-m holdfast.orchestrator.hosts.kubernetes.metrics_page`.

Owns: the page around the tables of runtime/observe/prometheus.py and metrics.py, and of the alerts
of the chart; a test compares their names with the chart's. Must not: define a metric or an alert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.orchestrator.runtime.observe.prometheus import METRICS

from .metrics import OWN

HEAD = """# Metrics

Generated from `orchestrator/runtime/observe/prometheus.py` and
`orchestrator/hosts/kubernetes/metrics.py`; a test
compares them. To change it: change a table there, or the words in `metrics_page.py`, then run
`python -m holdfast.orchestrator.hosts.kubernetes.metrics_page > docs/operations/metrics.md`.

| a job runs on | its metrics are at | labels and names |
|---|---|---|
| this machine | `http://127.0.0.1:PORT/metrics` of its controller; the port is \
`spec.metrics.port`, or a free one that `holdfast status` shows | as below |
| [Ray](ray.md) | Ray's own exporter, on the Ray node that its controller runs on | `ray_` before \
each name; a summary's `_sum` and `_count` are gauges |
| [Kubernetes](kubernetes.md) | port 8080 (`http`) of each pod of the operator, all jobs of the \
replica that leads | `namespace` beside `job` |

Every number comes from the same fold over the journal as the report: counters survive the
controller. `spec.metrics.port` and `spec.metrics.perRank` are for jobs of this machine: the
operator and Ray's exporter have no series per rank.
"""

JOBS = """
## Of a job
"""

OPERATOR = """
## Of the operator

On Kubernetes only, without the labels `namespace` and `job`. `holdfast_build_info` is the
operator's there.
"""

KUBERNETES = """
## On Kubernetes

The chart makes a ServiceMonitor or a PodMonitor (`metrics.serviceMonitor.enabled`,
`metrics.podMonitor.enabled`), the alerts below (`metrics.prometheusRule.enabled`) and a dashboard
(`metrics.dashboard.enabled`). Without the Prometheus operator, scrape port 8080 of the operator's
pods, with `honor_labels: true`: `namespace` and `job` are the training job's, and Prometheus would
put its own over them. All replicas are scraped; one that stands by knows no jobs.

A job that no controller runs has one series, `holdfast_job_state` of the state that it is in: it
has ended, its spec was refused, it is suspended and was never started, or the operator has not
taken it up yet. It is there as long as the object is: `spec.ttlSecondsAfterFinished` deletes jobs
that have ended. A job with a controller has between {least} and {most} series, whatever its number
of nodes.

The replica that leads counts from the journal, so a counter goes on where it was, but under the
labels of another pod (`instance`, `pod`): sum by `namespace` and `job`, as the dashboard does. What
happened while no operator led is in the counters afterwards, but `increase()` cannot see it.

## Alerts

| alert | severity | fires when | look at |
|---|---|---|---|
"""

LEAST, MOST = 56, 76
"""Series of a job; a test counts them."""


class Alert(NamedTuple):
    name: str
    severity: str
    when: str
    look: str


ALERTS = (
    Alert(
        "HoldfastNoLeader", "critical", "no replica has led for 2 minutes",
        "the operator's pods and its Lease; `/readyz` says why a replica cannot lead. Training "
        "goes on [for 15 minutes](../concepts/recovery.md#a-controller-that-dies), but "
        "nothing that breaks is "
        "repaired and no checkpoint is committed; then the pods of all jobs end",
    ),
    Alert(
        "HoldfastHang", "warning", "a job made no progress and was started again, in the last 15 "
        "minutes", "`kubectl describe tj`: the culprit and its stack",
    ),
    Alert(
        "HoldfastJobFailed", "warning", "a job is in state `failed`: given up, or refused for its "
        "spec. It ends when the job is deleted or put right",
        "`kubectl describe tj`: the condition Failed, the last incidents, the traceback",
    ),
    Alert(
        "HoldfastRestartStorm", "critical", "more than `restartsInHalfAnHour` (5) restarts were "
        "charged to a job's budgets in half an hour", "the incidents in its status",
    ),
    Alert(
        "HoldfastCheckpointOld", "warning", "a running job has had nothing newer in storage than "
        "`checkpointAgeSeconds` (3600) for 5 minutes; one without a checkpoint counts from its "
        "first step", "`status.storageProblem`, and `spec.checkpoint.storage`: the cadence",
    ),
    Alert(
        "HoldfastCheckpointFails", "warning", "a shard or a manifest could not be written in the "
        "last 15 minutes", "`status.storageProblem`: what storage answered",
    ),
    Alert(
        "HoldfastGoodputLow", "warning", "less than `goodputRatio` (0.8) of a running job's time "
        "moved it forward, for 30 minutes", "`status.ledger`: where the rest went",
    ),
    Alert(
        "HoldfastWaitsForNodes", "warning", "a job has been pending for 15 minutes",
        "its condition Ready: what the scheduler or the queue answered",
    ),
)  # fmt: skip

TAIL = """
`restartsInHalfAnHour`, `checkpointAgeSeconds` and `goodputRatio` are values of the chart, below
`metrics.prometheusRule`.
"""


def page() -> str:
    return "".join(
        [
            HEAD,
            JOBS,
            _table(
                (one.name, one.kind, ("job", *one.labels), one.help + _note(one.per_rank))
                for one in METRICS
            ),
            OPERATOR,
            _table((one.name, one.kind, one.labels, one.help) for one in OWN),
            KUBERNETES.format(least=LEAST, most=MOST),
            *(f"| `{one.name}` | {one.severity} | {one.when} | {one.look} |\n" for one in ALERTS),
            TAIL,
        ]
    )


def _note(per_rank: bool) -> str:
    return " Only with `spec.metrics.perRank`, on this machine." if per_rank else ""


def _table(rows: Iterable[tuple[str, str, tuple[str, ...], str]]) -> str:
    lines = ["", "| name | type | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, text in rows:
        named = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {named} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
