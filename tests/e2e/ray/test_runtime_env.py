"""Ray's runtime env of a submitted job: which processes have it, and where the spec is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import yaml

from tests.contract.ray_target import RayContractTarget
from tests.contract.targets import Controller, make_job

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, Submitted, holdfast
from .records import NAME, cleared, order, record

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WORD = "HOLDFAST_TEST_WORD"


class WithRuntimeEnv(Submitted):
    """Submitted with an environment variable and, as every submitted job, a directory."""

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


def test_a_controller_that_is_started_again_and_its_nodes_have_the_jobs_runtime_env(
    tmp_path: Path,
) -> None:
    """The command that starts the controller again has another runtime env."""
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


def test_starting_a_controller_again_reports_a_runtime_env_that_cannot_be_built(
    cluster: cluster_rig.RayRig,
) -> None:
    """Ray deletes uploaded files once no actor and no Ray job uses them."""
    from holdfast.orchestrator.hosts.ray import actor

    package = "gcs://_ray_pkg_0123456789abcdef.zip"
    record(msgspec.structs.replace(order(), runtime_env={"working_dir": package}))
    done = holdfast("attach", NAME, "--ray", cluster.address)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"job {NAME}: no controller could be started" in done.stderr
    assert package in done.stderr
    assert f"`holdfast cancel {NAME} --ray {cluster.address}` ends the job" in done.stderr
    assert actor.find(NAME) is None
    assert holdfast("cancel", NAME, "--ray", cluster.address).returncode == 0


def test_a_spec_is_found_anywhere_in_the_users_working_dir(tmp_path: Path) -> None:
    cluster, place = cluster_rig.connected(), tmp_path / "work" / "jobs"
    place.mkdir(parents=True)
    file, env = place / "own-dir.yaml", tmp_path / "env.yaml"
    tier = {"path": str(tmp_path / "tier")}
    file.write_text(yaml.safe_dump(spec("own-dir", 12, checkpoint=tier)))
    env.write_text(yaml.safe_dump({"working_dir": str(tmp_path / "work")}))
    done = holdfast(
        "run", str(file), "--ray", cluster.dashboard, "--runtime-env", str(env),
    )  # fmt: skip
    assert done.returncode == 0 and "12 of 12 steps" in done.stdout, done.stderr + done.stdout
    gone = holdfast("delete", "own-dir", "--yes", "--ray", cluster.address)
    assert gone.returncode == 0, gone.stderr


async def test_a_node_ends_when_its_ray_node_cannot_build_the_runtime_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's Ray node could build it, so only the agent's actor fails."""
    import ray

    from holdfast.orchestrator.backends.ray import actors

    cluster_rig.connected()
    package = "gcs://_ray_pkg_0123456789abcdef.zip"  # never uploaded
    agents = ray.remote(runtime_env={"py_modules": [package]})(actors.AgentActor)
    monkeypatch.setattr(actors, "_agent_class", lambda: agents)
    place = RayContractTarget(make_job(), tmp_path)

    try:
        async with Controller(place) as controller:
            (node,) = await controller.request(1)
            await controller.ended(node)
            detail = controller.gone[node].detail
            assert detail.startswith("its Ray node could not build the job's runtime env: ")
            assert package in detail and "Traceback" not in detail and "\n" not in detail
            assert await controller.backend.list_nodes() == ()
            await controller.backend.close(release=True)
        assert place.leftovers() == []
    finally:
        place.close()
