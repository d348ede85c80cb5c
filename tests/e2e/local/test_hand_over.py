"""SIGTERM to an agent during training, as a drain or a spot reclaim sends it: no step is lost."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.runtime.observe.view import Incident

from .local_rig import BOUND_S, Job, spec

pytestmark = pytest.mark.e2e

STEPS = 400
FULLY_SHARDED = {"parallelism": {"shard": 4}}
"""Each node holds a part of the state that no other node has."""
NEVER = 100_000
"""Steps that a job does not reach during a test."""
RARELY = {"checkpoint": {"memory": {"everySteps": NEVER}, "storage": {"everySteps": NEVER}}}
"""Steps are staged only on request."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    jobs = []

    def start(steps: int = STEPS, **changes: Any) -> Job:
        job = Job(tmp_path, spec("handover", steps, **changes))
        jobs.append(job)
        job.run()
        job.until(lambda view: view.step >= 10)
        return job

    yield start
    for job in jobs:
        job.end()


def terminate(job: Job) -> Incident:
    """SIGTERM to a training node: its agent ends by itself, and the job continues."""
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


@pytest.mark.parametrize("spares", [1, 0])
def test_a_spare_or_a_replacement_takes_the_place_of_a_drained_node(
    started: Any, spares: int
) -> None:
    job = started(nodes={"min": 2, "max": 2, "spares": spares}, **FULLY_SHARDED)
    job.until(lambda view: len(view.nodes) == 2 + spares)
    incident = terminate(job)
    assert incident.steps_lost == 0 and incident.restored_from == "memory"
    assert incident.world_size_after == 4


def test_a_controller_that_returns_in_time_learns_of_the_drain_and_loses_nothing(
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


def test_a_drain_loses_no_step_if_not_every_step_is_staged(started: Any) -> None:
    job = started(NEVER, nodes={"min": 2, "max": 2, "spares": 1}, **FULLY_SHARDED, **RARELY)
    job.until(lambda view: len(view.nodes) == 3)
    incident = terminate(job)
    assert incident.steps_lost == 0 and incident.restored_from == "memory"
    assert (incident.resumed_after_step or 0) >= 10


def test_neither_resize_nor_suspend_loses_a_step_that_was_not_staged(started: Any) -> None:
    job = started(NEVER, **RARELY)
    assert job.request("resize", nodes=1).ok
    smaller = job.running(incidents=1).incidents[0]
    assert (smaller.world_size_after, smaller.steps_lost) == (2, 0)
    assert job.request("suspend").ok
    held = job.until(lambda view: view.state == "suspended")
    assert job.request("resume").ok
    again = job.running(incidents=2).incidents[1]
    assert (again.restored_from, again.steps_lost) == ("storage", 0)
    assert again.resumed_after_step == held.step > (smaller.resumed_after_step or 0) >= 10


def test_a_requested_checkpoint_does_not_wait_for_its_interval(started: Any) -> None:
    job = started(NEVER, **RARELY)
    reply = job.request("checkpoint")
    view = job.until(lambda view: bool(view.checkpoints))
    assert [one.step for one in view.checkpoints] == [reply.body["step"]]
    assert not view.incidents and view.state == "running"
