"""Holdfast on the cluster of the end-to-end tests: a node loses its power, and training continues.

One job with one fault, with the default settings of Kubernetes. Times are those that the container
runtime gives to the lines of the workers' logs. See bench/kubernetes.py for the yardstick and
table.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.kubectl import Document
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until

CASES: dict[str, dict[str, Any]] = {
    "shrink": {"nodes": {"min": 1, "max": 2}},
    "spare": {"nodes": {"min": 2, "max": 2, "spares": 1}},
    "replacement": {"nodes": {"min": 2, "max": 2}},
}
STEPS_BEFORE = 20
BOUND_S = 120


@dataclass
class Result:
    case: str
    first_step_s: float = 0.0
    """Time from `kubectl apply` to the first finished step of all ranks."""
    next_step_s: float = 0.0
    """Time from the loss of power to the first step of the next generation."""
    steps_lost: int = 0
    node_readiness: str = ""
    """Readiness of the node for Kubernetes then."""
    decision: str = ""
    incident: Document = field(default_factory=dict)


def measure(case: str) -> Result:
    result = Result(case)
    with Run() as run:
        cluster = Cluster(run, programs.locate())
        cluster.start(3)
        operator = Operator(cluster)
        operator.install()
        operator.start()
        applied_s = time.time()
        kubectl = cluster.kubectl("default")
        job = Job(kubectl, example("measured", ENDLESS, **CASES[case]))
        job.wait_running(4)
        job.wait_steps(STEPS_BEFORE)
        if case == "spare":
            job.wait(lambda s: s["nodes"]["spares"] == 1, "to have a spare")
        first = steps(job, rank_zero(job))
        generations = sorted({generation for generation, _ in first})
        result.first_step_s = round(first[0][1] - applied_s, 2)
        lose(cluster, job, generations[-1], result)
    return result


def lose(cluster: Cluster, job: Job, generation: int, result: Result) -> None:
    survivor = rank_zero(job)
    before = job.status()
    node = next(
        cluster.nodes[pod["spec"]["nodeName"]]
        for pod in job.pods()
        if pod["metadata"]["labels"].get("holdfast.dev/rank", "0") != "0"
    )
    fault_s = time.time()
    node.lose_power()
    seen = until(
        lambda: [at for number, at in steps(job, survivor) if number > generation],
        "the next generation's first step",
        timeout_s=BOUND_S,
        last=job.story,
    )
    result.next_step_s = round(seen[0] - fault_s, 2)
    result.node_readiness = node.readiness()
    until(lambda: ended(job, before), "the incident's end", timeout_s=60, last=job.story)
    result.incident = ended(job, before)[0]
    result.steps_lost = result.incident["stepsLost"]
    result.decision = result.incident["decision"]


def ended(job: Job, before: Document) -> list[Document]:
    return [one for one in job.incidents_after(before) if "total" in one["seconds"]]


def rank_zero(job: Job) -> str:
    selector = f"holdfast.dev/job={job.name},holdfast.dev/rank=0"
    return str(job.kubectl.list("pods", selector)[0]["metadata"]["name"])


def steps(job: Job, pod: str) -> list[tuple[int, float]]:
    """(generation, time of the day in seconds) of every step in the log of rank 0."""
    found = []
    generation = 0
    for line in job.kubectl.run("logs", pod, "--timestamps").splitlines():
        at, _, text = line.partition(" ")
        if text.startswith("[rank 0, ") and ", generation " in text:
            generation = int(text.rpartition(" ")[2])
        elif text.startswith("[rank 0, ") and "] step " in text and " loss " in text:
            found.append((generation, seconds(at)))
    return found


def seconds(stamp: str) -> float:
    """RFC 3339 with nanoseconds, which Python's own parser would not take."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    parsed = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return parsed.timestamp() + float(f"0.{fraction or 0}")
