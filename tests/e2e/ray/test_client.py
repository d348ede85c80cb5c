"""Starting jobs through a Ray client (ray://), from a machine outside the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, holdfast, says, started
from .test_verbs import client_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SCRIPT = {"entrypoint": {"script": "train.py"}}
OLDER = """
import ray
ray.__version__ = "2.59.0"
from holdfast.orchestrator.cli.main import main
main(["status", "--ray", "{address}"])
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with client_server(cluster_rig.connected().address, tmp_path_factory.mktemp("ray")) as address:
        yield address


def written(place: Path, name: str, **changes: object) -> Path:
    file = place / f"{name}.yaml"
    changes = {"checkpoint": {"path": str(place / name)}} | changes
    file.write_text(yaml.safe_dump(spec(name, 12, **changes)))
    return file


def run_alone(mine: Path, file: Path, address: str) -> subprocess.CompletedProcess[str]:
    """`holdfast run` of a spec and a script in `mine`/in, a directory only it sees."""
    if os.geteuid() != 0:
        pytest.skip("another view of the file system needs root")
    mine.mkdir()
    command = f"""
        mount -t tmpfs none {mine} && mkdir {mine}/in && cd {mine}/in &&
        cp {file} job.yaml && touch train.py && cd / &&
        exec {sys.executable} -m holdfast.orchestrator.cli.main \\
            run {mine}/in/job.yaml --ray {address}
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert list(mine.iterdir()) == []
    return done


def test_a_recipe_runs_to_its_end_and_is_watched_meanwhile(address: str, tmp_path: Path) -> None:
    done = holdfast("run", str(written(tmp_path, "from-outside")), "--ray", address)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 steps" in done.stdout
    gone = holdfast("delete", "from-outside", "--yes", "--ray", address)
    assert gone.returncode == 0, gone.stderr


def test_a_watcher_reports_a_lost_connection_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray client only reaches its server."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "2")
    cluster, name = cluster_rig.connected().address, "watched-from-outside"
    file = tmp_path / "job.yaml"
    wanted = {"nodes": {"min": 2, "max": 2}, "checkpoint": {"path": str(tmp_path / "t")}}
    file.write_text(yaml.safe_dump(spec(name, 1_000_000, **wanted)))
    with client_server(cluster, tmp_path) as address:
        watcher = started("run", str(file), "--ray", address)
        says(watcher, " steps")
    said, _ = watcher.communicate(timeout=BOUND_S)
    try:
        assert watcher.returncode == 1 and "Traceback" not in said, said
        assert f"the connection to the Ray cluster at {address} was lost" in said
        shown = json.loads(holdfast("status", name, "--json", "--ray", cluster).stdout)
        assert shown["state"] == "running" and shown["incidents"] == []
    finally:
        assert holdfast("cancel", name, "--ray", cluster).returncode == 0
        assert holdfast("attach", name, "--ray", cluster).returncode == 1
        assert holdfast("delete", name, "--yes", "--ray", cluster).returncode == 0


def test_a_script_that_only_the_machine_of_the_command_has_is_uploaded(
    address: str, tmp_path: Path
) -> None:
    for way, where in (("client", address), ("head", cluster_rig.connected().address)):
        name = f"script-{way}"
        done = run_alone(tmp_path / way, written(tmp_path, name, **SCRIPT), where)
        assert done.returncode == 0 and "uploaded: 2 files" in done.stdout, done.stderr
        assert holdfast("delete", name, "--yes", "--ray", where).returncode == 0


def test_a_recipe_runs_where_no_node_has_the_directory_of_its_spec(
    address: str, tmp_path: Path
) -> None:
    """The same as with a spec that is mounted only into the head's pod."""
    for way, where in (("client", address), ("head", cluster_rig.connected().address)):
        name = f"spec-only-{way}"
        done = run_alone(tmp_path / way, written(tmp_path, name), where)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "12 of 12 steps" in done.stdout
        assert holdfast("delete", name, "--yes", "--ray", where).returncode == 0


def test_a_client_of_another_version_than_the_clusters_is_refused_with_both(address: str) -> None:
    """Ray's own check refuses a client with an older version."""
    import ray

    done = subprocess.run(
        [sys.executable, "-c", OLDER.format(address=address)],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "2.59.0" in done.stderr and ray.__version__ in done.stderr
    assert "expected the same Ray and Python here and in the cluster" in done.stderr
