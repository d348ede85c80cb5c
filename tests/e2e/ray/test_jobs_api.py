"""Submitting through the Jobs API of a cluster's dashboard, and Ray's own verbs on such a job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.pages import ROOT, blocks

from ..local.local_rig import spec
from . import cluster_rig
from .jobs import BOUND_S, holdfast

EXAMPLE = ROOT / "examples" / "stdlib-bytes.yaml"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    cluster = cluster_rig.connected()
    from ray.job_submission import JobSubmissionClient

    yield JobSubmissionClient(cluster.dashboard)


def until(client: Any, name: str, statuses: tuple[str, ...]) -> Any:
    give_up = time.monotonic() + BOUND_S
    while time.monotonic() < give_up:
        info = client.get_job_info(name)
        if info.status in statuses:
            return info
        time.sleep(0.2)  # the API has no events
    raise AssertionError(f"{info}\n{client.get_job_logs(name)}")


def submit(
    tmp_path: Path, name: str, steps: int, *words: str, verb: str = "submit", **changes: Any
) -> Any:
    file = tmp_path / f"{name}.yaml"
    changes = {"checkpoint": {"path": str(tmp_path / name)}} | changes
    file.write_text(yaml.safe_dump(spec(name, steps, **changes)))
    return holdfast(verb, str(file), "--ray", cluster_rig.connected().dashboard, *words)


def test_a_submitted_job_is_listed_by_ray_with_its_metadata_and_trains_to_its_end(
    client: Any, tmp_path: Path
) -> None:
    done = submit(tmp_path, "handed-in", 12)
    assert done.returncode == 0, done.stderr
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    metadata = client.get_job_info(name).metadata
    assert metadata["holdfast_job"] == metadata["job_name"] == "handed-in"
    assert until(client, name, ("SUCCEEDED", "FAILED", "STOPPED")).status == "SUCCEEDED"
    assert "12 of 12 steps" in client.get_job_logs(name)
    shown = holdfast("status", "handed-in", "--ray", cluster_rig.connected().dashboard)
    assert shown.returncode == 0 and "succeeded" in shown.stdout, shown.stderr
    gone = holdfast("delete", "handed-in", "--yes", "--ray", cluster_rig.connected().dashboard)
    assert gone.returncode == 0, gone.stderr


SEES = """
import os
print("value", os.environ["HF_TOKEN"][::-1], "files", *sorted(os.listdir(".")))
"""


def test_secrets_of_a_submitted_script_stay_here_or_are_not_shown(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SEES)
    for name in (".env", "id_rsa", "tokenizer.json", "out.bin", ".gitignore"):
        (tmp_path / name).write_text("*.bin")
    monkeypatch.chdir(tmp_path)
    address, value = cluster_rig.connected().dashboard, "a-value-that-is-shown-nowhere"
    done = holdfast(
        "run", "train.py", "--name", "no-secrets", "--env", f"HF_TOKEN={value}", "--gpus", "0",
        "--ray", address,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HF_TOKEN: (hidden)" in done.stdout and value not in done.stdout
    assert "not uploaded, because the name is one of secrets: .env, id_rsa" in done.stderr
    printed = holdfast("logs", "no-secrets", "--ray", cluster_rig.connected().address)
    seen = f"value {value[::-1]} files .gitignore .holdfast-job-no-secrets.yaml tokenizer.json "
    assert f"{seen}train.py" in printed.stdout, printed.stdout + printed.stderr
    with urllib.request.urlopen(f"{address}/api/jobs/") as answer:
        shown = answer.read().decode()
    assert "no-secrets" in shown and value not in shown
    (mine,) = [one for one in client.list_jobs() if "no-secrets" in (one.submission_id or "")]
    assert value not in client.get_job_logs(mine.submission_id)
    gone = holdfast("delete", "no-secrets", "--yes", "--ray", cluster_rig.connected().address)
    assert gone.returncode == 0, gone.stderr


def test_inside_the_cluster_auto_is_the_address_and_code_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster_rig.connected().address)  # as Ray does for its jobs
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("import os; print(os.listdir(), os.getcwd())")
    monkeypatch.chdir(tmp_path / "code")
    words = ("train.py", "--name", "from-inside", "--gpus", "0", "--ray", "auto")
    done = holdfast("submit", *words)
    assert "job from-inside: submitted" in done.stdout and "uploaded: 1 files" in done.stderr
    assert holdfast("attach", "from-inside", "--ray").returncode == 0
    printed = holdfast("logs", "from-inside", "--ray").stdout
    assert "train.py" in printed and str(tmp_path) not in printed
    assert holdfast("delete", "from-inside", "--yes", "--ray").returncode == 0


QUICKSTART = blocks((ROOT / "docs/user/quickstart-ray.md").read_text(), "bash")


def test_the_quickstart_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line names the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster_rig.connected().dashboard)
    monkeypatch.chdir(ROOT)
    (first,), lines, _scripts = QUICKSTART
    assert first.startswith("export RAY_ADDRESS=") and len(lines) == 5
    for line in lines:
        done = holdfast(*shlex.split(line)[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("line", QUICKSTART[2])
def test_the_quickstarts_scripts_train(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "frameworks" in line:
        pytest.importorskip("transformers", reason="`make test-frameworks` runs this test")
    monkeypatch.setenv("RAY_ADDRESS", cluster_rig.connected().dashboard)
    monkeypatch.chdir(ROOT)
    done = holdfast(*shlex.split(line)[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 workers; generation 1" in done.stdout
    name = re.search(r"^([\w-]+)  succeeded after ", done.stdout, re.MULTILINE)
    assert name is not None and holdfast("delete", name[1], "--yes", "--ray").returncode == 0


def test_stopping_the_ray_job_cancels_the_training_job(client: Any, tmp_path: Path) -> None:
    done = submit(tmp_path, "stopped", 1_000_000)
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    give_up = time.monotonic() + BOUND_S
    while "running" not in client.get_job_logs(name) and time.monotonic() < give_up:
        time.sleep(0.2)
    client.stop_job(name)
    until(client, name, ("STOPPED", "SUCCEEDED", "FAILED"))
    from holdfast.orchestrator.backends.ray import kv

    while not kv.JobKeyValueStore("stopped").exists(kv.ENDED) and time.monotonic() < give_up:
        time.sleep(0.2)
    shown = holdfast("status", "stopped", "--ray", cluster_rig.connected().address)
    assert "cancelled" in shown.stdout, shown.stdout + shown.stderr
    kv.JobKeyValueStore("stopped").clear()


def test_a_killed_driver_is_replaced_and_the_ray_job_stays_running(
    client: Any, tmp_path: Path
) -> None:
    """KubeRay would delete the cluster of a RayJob that stays FAILED while it trains."""
    from holdfast.orchestrator.cli.targets.ray.target import RayTarget

    done = submit(tmp_path, "orphaned", 1_000_000)
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    address = cluster_rig.connected().address

    def view() -> JobView:
        try:
            return RayTarget(address).find("orphaned").view()
        except HoldfastError:
            return JobView(name="orphaned", step=-1)

    def trained(beyond: int) -> JobView:
        give_up = time.monotonic() + BOUND_S
        while (seen := view()).step <= beyond:
            assert time.monotonic() < give_up, f"{seen}\n{client.get_job_logs(name)}"
            time.sleep(0.1)
        return seen

    def driver() -> psutil.Process:
        """The child of the process that Ray started."""
        (found,) = psutil.Process(process_of(name)).children()
        return found

    before, first = trained(1), driver()
    first.kill()
    give_up = time.monotonic() + BOUND_S
    while "step" not in client.get_job_logs(name).partition("another driver attaches")[2]:
        assert time.monotonic() < give_up, client.get_job_logs(name)
        time.sleep(0.2)
    after = trained(view().step + 5)
    assert after.generation == before.generation and after.num_incidents == 0
    assert client.get_job_info(name).status == "RUNNING"
    client.stop_job(name)
    assert until(client, name, ("SUCCEEDED", "FAILED", "STOPPED")).status == "STOPPED"
    while view().state != "cancelled":
        assert time.monotonic() < give_up, view()
        time.sleep(0.2)
    assert holdfast("delete", "orphaned", "--yes", "--ray", address).returncode == 0


def process_of(name: str) -> int:
    """The process that runs a Ray job's entrypoint; the driver is its child."""
    for process in psutil.process_iter(["cmdline"]):
        if "holdfast.orchestrator.cli.main" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
                    return int(process.pid)
    raise AssertionError(f"{name} has no process")


def test_an_invalid_runtime_env_is_refused_and_nothing_is_started(
    client: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "env.yaml"
    broken.write_text("py_modules: ['/no/such/directory']\n")
    done = submit(tmp_path, "no-env", 12, "--runtime-env", str(broken), verb="run")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--runtime-env: got" in done.stderr and "/no/such/directory" in done.stderr
    from holdfast.orchestrator.backends.ray import kv

    assert "no-env" not in kv.jobs()


def test_a_script_that_was_not_uploaded_is_refused_with_its_name(
    client: Any, tmp_path: Path
) -> None:
    document = spec("no-script", 12)
    document["spec"]["entrypoint"] = {"script": "nowhere.py"}
    file = tmp_path / "no-script.yaml"
    file.write_text(yaml.safe_dump(document))
    done = holdfast("submit", str(file), "--ray", cluster_rig.connected().dashboard)
    assert done.returncode == 2 and "nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_name_of_a_job_that_has_ended_is_refused_by_the_driver(
    client: Any, tmp_path: Path
) -> None:
    """No Ray job runs for it, but the cluster still has the record."""
    first = submit(tmp_path, "once", 12, verb="run")
    assert first.returncode == 0, first.stdout + first.stderr
    again = submit(tmp_path, "once", 12, verb="run")
    assert again.returncode == 2 and "Traceback" not in again.stdout + again.stderr
    taken = "metadata.name: got once, which exists in this Ray cluster (succeeded)"
    assert taken in again.stdout, again.stderr
    gone = holdfast("delete", "once", "--yes", "--ray", cluster_rig.connected().address)
    assert gone.returncode == 0, gone.stderr


def test_the_example_runs_unchanged_and_rays_own_commands_work_on_it(client: Any) -> None:
    cluster = cluster_rig.connected()
    done = holdfast("submit", str(EXAMPLE), "--ray", cluster.dashboard)
    assert done.returncode == 0, done.stderr
    name = done.stdout.split("Ray job ")[1].split(";")[0]
    try:
        give_up = time.monotonic() + BOUND_S
        # Not with Ray's command: it imports Ray each time, and the job waits for the processor.
        while not re.search(r"[1-9] of \d+ steps", client.get_job_logs(name)):
            assert time.monotonic() < give_up, client.get_job_logs(name)
            time.sleep(0.2)
        assert re.search(r"[1-9] of \d+ steps", ray_job(cluster, "logs", name))
        listed = ray_job(cluster, "list")
        assert name in listed and "'model': 'pretrain, 4 layers of 256'" in listed
        assert f"Job '{name}' was stopped" in ray_job(cluster, "stop", name)
        view = {"state": "finishing"}
        while view["state"] == "finishing":  # the driver ends while the last save is under way
            assert time.monotonic() < give_up, view
            shown = holdfast("status", "stdlib-bytes", "--json", "--ray", cluster.address)
            view = json.loads(shown.stdout)
        assert view["state"] == "cancelled" and view["world_size"] == 4, view
        output = holdfast("delete", "stdlib-bytes", "--yes", "--ray", cluster.address).stdout
        assert view["checkpoint_path"] in output
        shutil.rmtree(Path(view["checkpoint_path"]).parent)
    finally:
        holdfast("cancel", "stdlib-bytes", "--ray", cluster.address)


def ray_job(cluster: Any, *words: str) -> str:
    """Ray's own command."""
    done = subprocess.run(
        [Path(sys.executable).with_name("ray"), "job", *words, "--address", cluster.dashboard],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
        env=os.environ | {"RAY_ADDRESS": cluster.dashboard},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
