"""Holdfast on the cluster of the end-to-end tests: the operator is killed and started again.

Measures the effect on a job. Times are those that the container runtime gives to the lines of
rank 0's log. See bench/kubernetes.py for the table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tests.e2e.kubernetes.jobs import ENDLESS, Job, example
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.run import Run

from .node_loss import rank_zero, steps

STEPS_BEFORE = 40
STEPS_AFTER = 20
WARM_STEPS = 5
"""The first ones are slower than the rest."""
AWAY_S = 10.0
"""Longer than it takes to start a process: an operator whose pod has to find another node."""


@dataclass
class Result:
    case: str = "operator"
    away_s: float = 0.0
    """Time from SIGKILL until an operator leads again."""
    step_s: float = 0.0
    """Median before."""
    gap_before_s: float = 0.0
    gap_s: float = 0.0
    """The longest step before, and from SIGKILL on."""
    steps_meanwhile: int = 0
    """Finished while there was no operator."""
    steps_lost: int = 0
    num_generations: int = 0
    num_incidents: int = 0


def measure() -> Result:
    with Run() as run:
        cluster = Cluster(run, programs.locate())
        cluster.start(2)
        operator = Operator(cluster)
        operator.install()
        operator.start()
        kubectl = cluster.kubectl("default")
        job = Job(kubectl, example("measured", ENDLESS, nodes={"min": 2, "max": 2}))
        job.wait_running(4)
        job.wait_steps(STEPS_BEFORE)
        pod, before = rank_zero(job), job.status()
        fault_s = time.time()
        operator.kill()
        time.sleep(AWAY_S)
        operator.start()
        back_s = time.time()
        job.wait_steps(STEPS_AFTER)
        logged = steps(job, pod)
        incidents = job.incidents_after(before)
    times = [at for _, at in logged]
    gaps = [(later, later - sooner) for sooner, later in pairwise(times[WARM_STEPS:])]
    return Result(
        away_s=round(back_s - fault_s, 2),
        step_s=round(median(gap for at, gap in gaps if at < fault_s), 3),
        gap_before_s=round(max(gap for at, gap in gaps if at < fault_s), 2),
        gap_s=round(max(gap for at, gap in gaps if at >= fault_s), 2),
        steps_meanwhile=sum(fault_s <= at < back_s for at in times),
        steps_lost=sum(one["stepsLost"] for one in incidents),
        num_generations=len({generation for generation, _ in logged}),
        num_incidents=len(incidents),
    )
