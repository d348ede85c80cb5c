"""Lost parts of a job on a Ray cluster are replaced, and no finished step is trained twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from holdfast.orchestrator.backends.ray.state_api import StateApi

from . import cluster_rig
from .jobs import BOUND_S, Job, holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for all these tests: each test leaves it training."""
    job = Job(tmp_path_factory.mktemp("ray"), "faults", 1_000_000)
    yield job
    job.end()


def assert_on_the_head(job: Job) -> None:
    """Assert that the controller is on the head, where no loss of a node takes it too."""
    from holdfast.orchestrator.backends.ray import ray_nodes

    home = ray_nodes.alive_nodes()[job.controller()["ray_node"]]
    assert "node:__internal_head__" in home["Resources"]


def test_a_job_trains_with_each_node_on_a_ray_node_of_its_own(job: Job) -> None:
    view = job.running()
    places = {job.facts(node.name)["ray_node"] for node in view.nodes}
    assert len(places) == len(view.nodes) == 2
    assert view.world_size == 4
    assert_on_the_head(job)


def test_a_killed_worker_costs_no_step(job: Job) -> None:
    before = job.running().num_incidents
    os.kill(job.worker_pid(3), signal.SIGKILL)
    incident = job.incident_after(before)
    assert "worker 3" in incident.title and "SIGKILL" in incident.title
    assert incident.steps_lost == 0 and incident.restored_from == "memory"


def test_calls_of_ended_controllers_do_not_block_an_agents_actor(job: Job) -> None:
    from holdfast.orchestrator.backends.ray import actors

    node = job.members()[-1]
    actor = actors.find_agent(job.name, node)
    left = [actor.wait_for_end.remote() for _ in range(100)]  # more than an actor runs at once
    assert job.facts(node)["pid"]
    del left  # the next test shows that the controller still gets this node's end


def test_a_killed_agent_actor_is_replaced_and_costs_no_step(job: Job) -> None:
    before = job.running().num_incidents
    node = job.members()[-1]
    os.kill(job.facts(node)["actor_pid"], signal.SIGKILL)
    incident = job.incident_after(before)
    assert node in incident.title and incident.steps_lost == 0
    job.running()
    assert node not in job.members(), "names are not used again"


def test_training_goes_on_when_its_command_is_killed_and_it_can_be_watched_again(job: Job) -> None:
    before = job.running()
    os.kill(job.command.pid, signal.SIGKILL)
    job.command.wait()
    size = len(job.output.read_text())
    job.attach()
    after = job.until(lambda view: view.step > before.step + 20)
    assert after.generation == before.generation
    assert after.num_incidents == before.num_incidents
    job.until(lambda view: len(job.output.read_text()) > size)


def test_a_killed_controller_restarts_and_training_is_not_interrupted(job: Job) -> None:
    before = job.running()
    os.kill(job.controller()["pid"], signal.SIGKILL)
    after = job.until(
        lambda view: (
            view.controller_restarts > before.controller_restarts and view.step > before.step
        )
    )
    assert after.num_incidents == before.num_incidents
    assert after.generation == before.generation
    assert_on_the_head(job)


def test_a_lost_ray_node_is_replaced_and_costs_no_step(job: Job) -> None:
    before = job.running().num_incidents
    node = job.members()[-1]
    job.cluster.kill_node(job.facts(node)["ray_node"])
    incident = job.incident_after(before)
    assert node in incident.title and incident.steps_lost == 0
    assert node not in {one.name for one in job.running().nodes}


def test_beside_a_lost_ray_node_logs_over_http_are_read_without_a_ray_job(job: Job) -> None:
    """The lost one is still in Ray's list of nodes, as dead."""
    job.running()
    api, give_up = StateApi(job.cluster.dashboard), time.monotonic() + BOUND_S
    while len(api.ray_nodes()) != job.cluster.num_nodes + 1:  # the head is one
        assert time.monotonic() < give_up, "Ray has not noticed the loss"
    done = holdfast("logs", job.name, "--rank", "0", "--ray", job.cluster.dashboard)
    assert done.returncode == 0 and "parameters" in done.stdout and done.stderr == ""


def test_no_actor_and_no_group_of_a_cancelled_job_stays_in_the_cluster(job: Job) -> None:
    import ray

    job.end()
    left = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    assert [name for name in left if "faults" in name] == []
    assert cluster_rig.group_names("faults") == []
