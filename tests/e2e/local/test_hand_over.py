"""SIGTERM to a real agent in real training, as a drain or a spot reclaim sends it: nothing is lost.

Owns: the hand-over of one node, to a spare, to a replacement and by shrinking. Must not: time it.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.view import Incident

from .rig import BOUND_S, Job, spec

pytestmark = pytest.mark.e2e

STEPS = 400
FULLY_SHARDED = {"parallelism": {"shard": 4}}
"""Each node has a part of the state that no other has."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    jobs = []

    def start(**changes: Any) -> Job:
        job = Job(tmp_path, spec("handover", STEPS, **changes))
        jobs.append(job)
        job.run()
        job.until(lambda view: view.step >= 10)
        return job

    yield start
    for job in jobs:
        job.end()


def terminate(job: Job) -> Incident:
    """SIGTERM to a node that trains; its agent ends by itself, and the job goes on."""
    view = job.until(lambda view: sum(n.state == "member" for n in view.nodes) == 2)
    node = next(n.name for n in view.nodes if n.state == "member")
    pid = job.agent_pid(node)
    pidfd = os.pidfd_open(pid)
    job.kill(pid, signal.SIGTERM)
    view = job.running(incidents=1)
    assert select.select([pidfd], [], [], BOUND_S)[0], "the agent has not ended"
    os.close(pidfd)
    assert (view.incidents[0].failure_class, view.incidents[0].culprit_node) == ("preemption", node)
    return view.incidents[0]


def test_a_spare_takes_the_place_of_a_node_that_is_drained(started: Any) -> None:
    job = started(nodes={"min": 2, "max": 2, "spares": 1}, **FULLY_SHARDED)
    job.until(lambda view: len(view.nodes) == 3)
    incident = terminate(job)
    assert incident.steps_lost == 0 and incident.restored_from == "memory"
    assert incident.world_size_after == 4


def test_a_job_without_spares_waits_for_the_replacement_and_loses_nothing(started: Any) -> None:
    job = started(nodes={"min": 2, "max": 2}, **FULLY_SHARDED)
    incident = terminate(job)
    assert incident.steps_lost == 0 and incident.restored_from == "memory"
    assert incident.world_size_after == 4


def test_a_controller_that_comes_back_in_time_learns_of_it_and_nothing_is_lost(
    started: Any,
) -> None:
    job = started(nodes={"min": 2, "max": 2, "spares": 1}, **FULLY_SHARDED)
    view = job.until(lambda view: sum(n.state == "member" for n in view.nodes) == 2)
    node = next(n.name for n in view.nodes if n.state == "member")
    job.command.kill()
    job.command.wait()
    job.kill(job.agent_pid(node), signal.SIGTERM)
    job.attach()
    incident = job.running(incidents=1).incidents[0]
    assert (incident.failure_class, incident.culprit_node) == ("preemption", node)
    assert incident.steps_lost == 0 and incident.restored_from == "memory"
