"""A job deleted in each of its states, with real pods: nothing of it is left.

The slow job makes short states last for seconds: one of its steps has many small batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kubernetes.jobs import ENDLESS, START_TIMEOUT_S, Job, example
from tests.e2e.kubernetes.rig.kubectl import Document, Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NOWHERE = {"podTemplate": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "nowhere"}}}}


def small(name: str, **spec: Any) -> Document:
    """A job with one worker on one node."""
    alone = {"nodes": {"min": 1, "max": 1}, "workersPerNode": 1, "parallelism": {}}
    return example(name, ENDLESS, **(alone | spec))


def slow(name: str) -> Document:
    """A job whose batches take about 0.1 s of a core each."""
    document = small(name, recovery={"hangTimeoutSeconds": 600})
    config = document["spec"]["entrypoint"]["recipe"]["config"]
    config.update(globalBatch=64, microBatch=1)
    config["model"].update(dim=256, numLayers=4)
    config["data"]["sequenceLength"] = 512
    return document


def reach(job: Job, state: str) -> None:
    """Wait for a phase, also of a job that will fail, for which job.wait() raises."""
    until(
        lambda: job.status().get("state") == state, f"{job.name} to be {state}",
        timeout_s=START_TIMEOUT_S, every_s=0.2, last=job.report,
    )  # fmt: skip


def suspend(job: Job) -> None:
    patch = json.dumps({"spec": {"suspend": True}})
    job.kubectl.run("patch", "trainingjob", job.name, "--type=merge", f"--patch={patch}")


# -- reaching each state -----------------------------------------------------------------------
def pending(kubectl: Kubectl) -> Job:
    job = Job(kubectl, small("pending", kubernetes=NOWHERE))
    reach(job, "pending")
    until(lambda: len(job.pods()) == 1, "its pod", timeout_s=60)
    return job


def never_started(kubectl: Kubectl) -> Job:
    job = Job(kubectl, small("held", suspend=True))
    reach(job, "suspended")
    return job


def starting(kubectl: Kubectl) -> Job:
    job = Job(kubectl, slow("starting"))
    reach(job, "starting")
    return job


def running(kubectl: Kubectl) -> Job:
    job = Job(kubectl, small("running"))
    reach(job, "running")
    return job


def recovering(kubectl: Kubectl) -> Job:
    job = Job(kubectl, slow("recovering"))
    reach(job, "starting")
    job.chaos("kill-worker", rank=0)
    reach(job, "recovering")
    return job


def suspending(kubectl: Kubectl) -> Job:
    """Job whose last checkpoint cannot be written, so that it stays suspending."""
    job = Job(kubectl, small("suspending"))
    reach(job, "running")
    place = Path(job.status()["checkpointPath"])
    place.mkdir(exist_ok=True)
    place.chmod(0o555)  # for the pods, which are not root
    suspend(job)
    reach(job, "suspending")
    return job


def suspended(kubectl: Kubectl) -> Job:
    job = Job(kubectl, small("suspended"))
    reach(job, "running")
    suspend(job)
    reach(job, "suspended")
    return job


def failed(kubectl: Kubectl) -> Job:
    document = small("failed")
    document["spec"]["entrypoint"]["recipe"]["config"]["data"]["source"] = "/nowhere"
    job = Job(kubectl, document)
    reach(job, "failed")
    assert "/nowhere" in job.status()["reason"], job.report()
    return job


def cancelled(kubectl: Kubectl) -> Job:
    job = Job(kubectl, small("cancelled"))
    reach(job, "running")
    job.annotate("holdfast.dev/cancel", "test")
    reach(job, "cancelled")
    return job


WAYS = (
    pending, never_started, starting, running, recovering, suspending, suspended, failed, cancelled,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_deleted_job_leaves_nothing(
    operator: Operator, cluster_namespace: Kubectl, way: Any
) -> None:
    operator.ensure_running()
    job = way(cluster_namespace)
    assert [one for one in job.left() if one.startswith("secrets")] or way is never_started
    job.delete()
