"""Generates docs/operations/metrics.md: `python -m tools.metrics_page`.

The tables come from runtime/observe/prometheus.py and hosts/kubernetes/metrics.py. A test
compares the alerts with those of the chart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.orchestrator.hosts.kubernetes.metrics import OPERATOR_METRICS
from holdfast.orchestrator.runtime.observe.prometheus import METRICS

HEAD = """# Metrics

Generated from `orchestrator/runtime/observe/prometheus.py` and
`orchestrator/hosts/kubernetes/metrics.py`. To change it, change a table there or the text in
`tools/metrics_page.py`, then run `python -m tools.metrics_page > docs/operations/metrics.md`.

| a job runs on | its metrics are at | labels and names |
|---|---|---|
| this machine | `http://127.0.0.1:PORT/metrics` of its controller; the port is \
`spec.metrics.port`, or a free one that `holdfast status` shows | as below |
| [Ray](ray.md) | Ray's own exporter, on the Ray node that its controller runs on | `ray_` before \
each name; the `_sum` and `_count` of a summary are gauges |
| [Kubernetes](kubernetes.md) | port 8080 (`http`) of each pod of the operator; the leader has the \
metrics of all jobs | also `namespace` |

Counters continue after a restart of the controller. `spec.metrics.port` and `spec.metrics.perRank`
are for jobs of this machine.
"""

JOBS = """
## Metrics of a job

Each has the label `job` too.
"""

OPERATOR = """
## Metrics of the operator

On Kubernetes only, without the labels `namespace` and `job`. There `holdfast_build_info` describes
the operator.
"""

KUBERNETES = """
## On Kubernetes

The chart can create a ServiceMonitor or a PodMonitor (`metrics.serviceMonitor.enabled`,
`metrics.podMonitor.enabled`), the alerts below (`metrics.prometheusRule.enabled`) and a dashboard
(`metrics.dashboard.enabled`). Without the Prometheus operator, scrape port 8080 of the operator's
pods with `honor_labels: true`: `namespace` and `job` belong to the training job, and Prometheus
would replace them by its own. All replicas are scraped; a standby replica has no jobs.

A job that has ended or has not started has one series, `holdfast_job_state`, as long as the object
exists. A job with a controller has between {least} and {most} series, whatever its number of nodes.

After a failover a counter continues with its old value, but with the labels of another pod
(`instance`, `pod`): sum by `namespace` and `job`, as the dashboard does. Counters include what
happened while no operator led, but `increase()` cannot see it.

## Alerts

| alert | severity | fires when | look at |
|---|---|---|---|
"""

LEAST, MOST = 61, 88
"""Series of a job; a test counts them."""


class Alert(NamedTuple):
    name: str
    severity: str
    when: str
    look: str


ALERTS = (
    Alert(
        "HoldfastNoLeader",
        "critical",
        "no replica has led for 2 minutes",
        "the operator's pods and its Lease; `/readyz` says why a replica cannot lead. Training "
        "goes on ([how long](../concepts/recovery.md#a-controller-that-dies)), but no failure is "
        "repaired and no checkpoint is committed",
    ),
    Alert(
        "HoldfastHang",
        "warning",
        "a job hung and was restarted in the last 15 minutes",
        "`kubectl describe tj`: the culprit and its stack",
    ),
    Alert(
        "HoldfastJobFailed",
        "warning",
        "a job is in state `failed`: it ended with an error, or its spec was rejected. The alert "
        "ends when the job is deleted or its spec is corrected",
        "`kubectl describe tj`: the condition Failed, the last incidents, the traceback",
    ),
    Alert(
        "HoldfastRestartStorm",
        "critical",
        "more than `restartsInHalfAnHour` (5) restarts were charged to the budgets of a job in "
        "half an hour",
        "the incidents in its status",
    ),
    Alert(
        "HoldfastCheckpointOld",
        "warning",
        "for 5 minutes, the newest checkpoint in storage of a running job has been older than "
        "`checkpointAgeSeconds` (3600); without a checkpoint, the time since its first step counts",
        "`status.storageProblem`, and the interval in `spec.checkpoint.storage`",
    ),
    Alert(
        "HoldfastCheckpointFails",
        "warning",
        "a shard or a manifest could not be written in the last 15 minutes",
        "`status.storageProblem`: the error of the storage",
    ),
    Alert(
        "HoldfastGoodputLow",
        "warning",
        "for 30 minutes, less than `goodputRatio` (0.8) of a running job's time was productive",
        "`status.ledger`: where the time went",
    ),
    Alert(
        "HoldfastWaitsForNodes",
        "warning",
        "a job has been pending for 15 minutes",
        "its condition Ready: the message of the scheduler or the queue",
    ),
)

TAIL = """
`restartsInHalfAnHour`, `checkpointAgeSeconds` and `goodputRatio` are values of the chart, in
`metrics.prometheusRule`.
"""


def page() -> str:
    return "".join(
        [
            HEAD,
            JOBS,
            _table(
                (one.name, one.kind, one.labels, one.help + _note(one.per_rank)) for one in METRICS
            ),
            OPERATOR,
            _table((one.name, one.kind, one.labels, one.help) for one in OPERATOR_METRICS),
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
