"""What a job is handed in with, Ray's runtime env: who has it, and where the spec is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import yaml

from tests.contract.ray_target import RayContractTarget
from tests.contract.targets import Controller, make_job, run

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, Submitted, holdfast
from .records import NAME, cleared, order, record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WORD = "HOLDFAST_TEST_WORD"


class WithRuntimeEnv(Submitted):
    """One handed in with a variable, and with the directory that every submitted job has."""

    def _words(self) -> list[str]:
        env = self.file.with_name("env.yaml")
        env.write_text(yaml.safe_dump({"env_vars": {WORD: "kept"}}))
        return [*super()._words(), "--runtime-env", str(env)]


@pytest.fixture
def cluster() -> Iterator[cluster_rig.RayRig]:
    with cleared() as cluster:
        yield cluster


def has_runtime_env(pid: int) -> bool:
    found = psutil.Process(pid).environ()
    return found.get(WORD) == "kept" and "working_dir_files" in found.get("PYTHONPATH", "")


def test_a_revived_controller_and_all_nodes_after_it_have_the_jobs_runtime_env(
    tmp_path: Path,
) -> None:
    """Who revives it is another Ray job, or none, with another runtime env."""
    import ray

    from holdfast.orchestrator.hosts.ray import actor

    job = WithRuntimeEnv(tmp_path, "revived", 1_000_000)
    try:
        job.running()
        assert has_runtime_env(job.controller()["pid"])
        before = set(job.members())
        ray.kill(actor.find(job.name), no_restart=True)
        assert job.command.wait(BOUND_S) == 1
        job.attach()
        job.running()
        assert has_runtime_env(job.controller()["pid"])
        assert holdfast("suspend", job.name, "--ray", job.cluster.address).returncode == 0
        job.until(lambda view: view.state == "suspended")
        assert holdfast("resume", job.name, "--ray", job.cluster.address).returncode == 0
        job.running()
        after = job.members()
        assert not before & set(after)
        assert all(has_runtime_env(job.facts(node)["pid"]) for node in after)
    finally:
        job.end()


def test_a_runtime_env_that_cannot_be_built_any_more_is_told_by_who_revives_the_controller(
    cluster: cluster_rig.RayRig,
) -> None:
    """Ray deletes what was uploaded once no actor and no Ray job uses it."""
    from holdfast.orchestrator.hosts.ray import actor

    package = "gcs://_ray_pkg_0123456789abcdef.zip"
    record(msgspec.structs.replace(order(), runtime_env={"working_dir": package}))
    done = holdfast("run", "--attach", NAME, "--ray", cluster.address)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"job {NAME}: no controller could be started" in done.stderr
    assert package in done.stderr
    assert f"`holdfast cancel {NAME} --ray {cluster.address}` ends the job" in done.stderr
    assert actor.find(NAME) is None
    assert holdfast("cancel", NAME, "--ray", cluster.address).returncode == 0


def test_a_spec_is_found_wherever_it_is_in_a_working_dir_of_ones_own(tmp_path: Path) -> None:
    cluster, place = cluster_rig.connected(), tmp_path / "work" / "jobs"
    place.mkdir(parents=True)
    file, env = place / "own-dir.yaml", tmp_path / "env.yaml"
    tier = {"path": str(tmp_path / "tier")}
    file.write_text(yaml.safe_dump(spec("own-dir", 12, checkpoint=tier)))
    env.write_text(yaml.safe_dump({"working_dir": str(tmp_path / "work")}))
    done = holdfast(
        "submit", str(file), "--ray", cluster.dashboard, "--runtime-env", str(env), "--follow",
    )  # fmt: skip
    assert done.returncode == 0 and "12 of 12 steps" in done.stdout, done.stderr + done.stdout
    gone = holdfast("delete", "own-dir", "--yes", "--ray", cluster.address)
    assert gone.returncode == 0, gone.stderr


def test_a_ray_node_that_cannot_build_the_runtime_env_is_told_as_the_end_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's could, so it is the agent's actor that dies of it."""
    import ray

    from holdfast.orchestrator.backends.ray import actors

    cluster_rig.connected()
    package = "gcs://_ray_pkg_0123456789abcdef.zip"  # nobody has uploaded it
    agents = ray.remote(runtime_env={"py_modules": [package]})(actors.AgentActor)
    monkeypatch.setattr(actors, "_agent_class", lambda: agents)
    place = RayContractTarget(make_job(), tmp_path)

    async def scenario(controller: Controller) -> None:
        (node,) = await controller.request(1)
        await controller.ended(node)
        told = controller.gone[node].detail
        assert told.startswith("its Ray node could not build the job's runtime env: ")
        assert package in told and "Traceback" not in told and "\n" not in told
        assert await controller.backend.list_nodes() == ()
        await controller.backend.close(release=True)

    try:
        run(scenario, place)
        assert place.leftovers() == []
    finally:
        place.close()
