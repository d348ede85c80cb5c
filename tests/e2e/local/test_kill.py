"""Training on this machine while workers, nodes, agents and the controller are killed.

The tests share one running job, because starting it takes long; each test begins and ends with a
training job.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("kill"), spec("kill", ENDLESS))
    job.run()
    try:
        job.running(incidents=0)
        yield job
    finally:
        job.end()


def incidents(job: Job) -> int:
    return len(job.until(lambda view: True).incidents)


def test_a_killed_worker_costs_at_most_one_step(job: Job) -> None:
    before = incidents(job)
    victim = job.worker_pids()[1]
    assert psutil.Process(victim).name() == "hf-rank-1"
    job.kill(victim)
    incident = job.running(incidents=before + 1).incidents[-1]
    assert incident.culprit_rank == 1
    assert incident.failure_class == "infrastructure"
    assert "SIGKILL" in incident.title
    assert incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert not incident.rehearsal


def test_a_killed_node_is_replaced_and_its_shards_are_restored_from_memory(job: Job) -> None:
    before = incidents(job)
    node = job.until(lambda view: True).nodes[0].name
    job.kill(job.agent_pid(node))
    incident = (after := job.running(incidents=before + 1)).incidents[-1]
    assert incident.culprit_node == node
    assert incident.restored_from == "memory"
    assert incident.world_size_after == 4
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    assert node not in [one.name for one in after.nodes]


def test_a_stopped_worker_is_named_as_the_cause_of_the_hang(job: Job) -> None:
    before = incidents(job)
    # The learned limit needs a few steps of this generation.
    step = job.until(lambda view: True).step
    job.until(lambda view: view.step >= step + 10)
    job.kill(job.worker_pids()[2], signal.SIGSTOP)
    incident = job.running(incidents=before + 1).incidents[-1]
    assert incident.failure_class == "hang"
    assert incident.culprit_rank == 2
    assert incident.stacks


def test_agents_that_all_stop_sending_heartbeats_together_are_not_declared_lost(job: Job) -> None:
    before = job.until(lambda view: view.state == "running" and len(view.nodes) == 2)
    agents = [job.agent_pid(node.name) for node in before.nodes]
    for pid in agents:
        job.kill(pid, signal.SIGSTOP)
    try:
        job.until(lambda view: "no heartbeat from any of 2 nodes" in view.reason)
    finally:
        for pid in agents:
            job.kill(pid, signal.SIGCONT)
    seen = job.until(lambda view: "ranks train" in view.reason)
    after = job.until(lambda view: view.step >= seen.step + 5)
    assert after.generation == before.generation, after.incidents
    assert len(after.incidents) == len(before.incidents)


def test_training_continues_without_a_controller_until_a_new_one_takes_over(job: Job) -> None:
    before = job.until(lambda view: True)
    workers = job.worker_pids()
    job.kill(job.command.pid)
    job.command.wait()
    job.attach()
    after = job.until(lambda view: view.step > before.step and view.controller_restarts > 0)
    assert after.generation == before.generation
    assert len(after.incidents) == len(before.incidents)
    assert job.worker_pids() == workers


def test_a_node_killed_while_there_is_no_controller_is_replaced(job: Job) -> None:
    view = job.until(lambda view: True)
    job.kill(job.command.pid)
    job.command.wait()
    node = view.nodes[-1].name
    job.kill(job.agent_pid(node))
    job.attach()
    incident = job.running(incidents=len(view.incidents) + 1).incidents[-1]
    assert incident.culprit_node == node
    assert incident.restored_from == "memory"


def test_training_survives_its_node_launcher_and_the_next_one_starts_nodes(job: Job) -> None:
    before = job.until(lambda view: True)
    agents = {job.agent_pid(node.name) for node in before.nodes}
    (launcher,) = (one for one in job.processes() if one.name() == "hf-host")
    launcher.kill()
    after = job.until(lambda view: view.step > before.step + 5)
    assert after.generation == before.generation
    assert all(psutil.pid_exists(pid) for pid in agents)
    node = after.nodes[-1].name
    job.kill(job.agent_pid(node))
    incident = job.running(incidents=len(before.incidents) + 1).incidents[-1]
    assert incident.culprit_node == node and incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    job.until(lambda v: v.state == "running" and v.world_size == 4)


def test_a_job_shrinks_without_a_replacement_and_grows_again(job: Job) -> None:
    view = job.until(lambda view: True)
    assert job.request("chaos", kind="kill-node", node=view.nodes[-1].name, hold_s=10.0).ok
    small = job.until(lambda v: v.state == "running" and v.world_size == 2)
    incident = small.incidents[-1]
    assert incident.rehearsal and incident.restored_from == "memory"
    assert incident.steps_lost is not None and incident.steps_lost <= 1
    job.until(lambda v: v.state == "running" and v.world_size == 4)


def test_cancelling_leaves_no_process_behind(job: Job) -> None:
    job.running(incidents=incidents(job))
    job.command.send_signal(signal.SIGINT)
    view = job.wait()
    assert view.state == "cancelled" and view.finished_ns is not None
    assert job.command.returncode == 130
    assert job.processes() == []
    assert not job.directory.host_socket.exists()
    assert "Ctrl-C: cancelling the job" in job.output()
    elapsed_s = (view.finished_ns - view.submitted_ns) / 1e9
    assert abs(sum(view.ledger.values()) - elapsed_s) < 1e-6
