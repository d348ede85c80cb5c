"""`--ray` on the command line, and checks of jobs that are submitted to run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.backends.ray import jobs_api, state_api
from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.cli.options import complete
from holdfast.orchestrator.errors import HoldfastError
from tests.unit.hosts.ray.memory_store import MemoryStore

from ...conftest import Holdfast

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
Write = Callable[[str], Path]

SPEC = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: demo}
spec:
"""
RECIPE = SPEC + "  entrypoint: {recipe: {name: pretrain, config: {steps: 1}}}\n"
NOWHERE = "http://127.0.0.1:1"
"""An address that is connected to only after the checks of the file."""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["run", "job.yaml", "--ray"], ["run", "job.yaml", "--ray="]),
        (["status", "--ray", "--json"], ["status", "--ray=", "--json"]),
        (["status", "--ray", "auto"], ["status", "--ray", "auto"]),
        (["status", "--ray", "head:6379", "job"], ["status", "--ray", "head:6379", "job"]),
        (["status", "--ray=head:6379"], ["status", "--ray=head:6379"]),
    ],
)
def test_an_address_may_be_left_out(words: list[str], completed: list[str]) -> None:
    assert complete(words) == completed


@pytest.mark.parametrize("address", ["", NOWHERE])
def test_without_ray_its_installation_is_named(
    address: str, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = holdfast("status", f"--ray={address}")
    assert result.code == 2 and "package ray is not installed" in result.err
    assert "pip install '.[ray]'" in result.err


def test_a_word_in_place_of_an_address_is_named(holdfast: Holdfast, write: Write) -> None:
    file = write(RECIPE)
    result = holdfast("run", "--ray", file)
    assert result.code == 2 and "FILE: got nothing" in result.err
    for address in ("a-job", "ray://head"):
        result = holdfast("run", file, "--ray", address)
        expected = f"--ray: got {address}; expected auto, HOST:PORT"
        assert result.code == 2 and expected in result.err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "ray://[::1]:1"])
def test_an_address_without_a_listener_is_refused_at_once(address: str, holdfast: Holdfast) -> None:
    result = holdfast("status", "--ray", address)
    assert result.code == 2 and f"--ray: got {address} (" in result.err


@pytest.mark.parametrize("path", ["out", "./out", "file://out"])
def test_a_relative_checkpoint_path_of_a_job_that_runs_elsewhere_is_refused(
    path: str, holdfast: Holdfast, write: Write
) -> None:
    """The path would be in Ray's copy of the directory, on one machine."""
    file = write(RECIPE + f"  checkpoint: {{path: '{path}'}}\n")
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2
    assert f"spec.checkpoint.path: got {path}; expected an absolute path or a URL" in result.err
    assert "use a directory that all nodes share, or an object store" in result.err


@pytest.mark.parametrize("path", ["/no/such/place", "~/out", "s3://bucket/x", "file:///no/such"])
def test_a_checkpoint_path_of_the_cluster_is_not_looked_up_here(
    path: str, holdfast: Holdfast, write: Write
) -> None:
    file = write(RECIPE + f"  checkpoint: {{path: '{path}'}}\n")
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2 and f"--ray: got {NOWHERE}" in result.err


def test_data_and_scripts_that_are_not_uploaded_are_refused(
    holdfast: Holdfast, write: Write
) -> None:
    data = "{steps: 1, data: {source: corpus}}"
    file = write(SPEC + f"  entrypoint: {{recipe: {{name: pretrain, config: {data}}}}}\n")
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2 and "data.source: got corpus; expected stdlib, or an abs" in result.err
    file = write(SPEC + "  entrypoint: {script: ../train.py}\n")
    (file.parent.parent / "train.py").touch()
    result = holdfast("submit", file, "--ray", NOWHERE)
    assert result.code == 2 and "spec.entrypoint.script: got ../train.py" in result.err
    assert "the only directory that is uploaded" in result.err


def test_a_working_dir_without_the_spec_is_refused(holdfast: Holdfast, write: Write) -> None:
    """The driver would fail to find the spec, long after the command has succeeded."""
    for entrypoint in ("{recipe: {name: pretrain, config: {steps: 1}}}", "{script: train.py}"):
        file = write(SPEC + f"  entrypoint: {entrypoint}\n")
        elsewhere, env = file.parent / "elsewhere", file.parent / "env.yaml"
        elsewhere.mkdir(exist_ok=True)
        env.write_text(f"working_dir: {elsewhere}\n")
        result = holdfast("submit", file, "--ray", NOWHERE, "--runtime-env", env)
        assert result.code == 2, result.err
        assert f"--runtime-env: got working_dir: {elsewhere}, which {file} is not in" in result.err
        assert "expected a directory that the spec is in" in result.err


@pytest.mark.parametrize("own", ["{0}", "{0}/below/..", "https://host/a.zip", "5", "", "/no/such"])
def test_a_working_dir_that_may_hold_the_spec_is_not_refused_here(
    own: str, holdfast: Holdfast, write: Write
) -> None:
    """An archive is read in the cluster, and Ray itself reports what it refuses."""
    file = write(RECIPE)
    env = file.parent / "env.yaml"
    (file.parent / "below").mkdir()
    env.write_text(f"working_dir: {own.format(file.parent)}\n")
    result = holdfast("submit", file, "--ray", NOWHERE, "--runtime-env", env)
    assert result.code == 2 and f"--ray: got {NOWHERE}" in result.err


@pytest.mark.parametrize("option", ["--json", "--logs"])
def test_what_the_log_of_a_ray_job_cannot_show_is_rejected(
    option: str, holdfast: Holdfast, write: Write
) -> None:
    result = holdfast("run", write(RECIPE), "--ray", NOWHERE, option)
    text = f"{option}: got it with `holdfast run --ray {NOWHERE}`; expected it with `attach`, after"
    assert result.code == 2 and text in result.err


def test_a_name_is_free_again_when_the_upload_of_the_code_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.orchestrator.cli.targets.ray import target

    store = MemoryStore()
    monkeypatch.setattr(store, "put", lambda *_: 1 / 0)
    monkeypatch.setattr(target.kv, "JobKeyValueStore", lambda _job: store)
    monkeypatch.setattr(target.actor, "own_runtime_env", dict)
    with pytest.raises(HoldfastError, match="nothing was started"):
        job = parse_job(RECIPE, "job.yaml")
        target.RayTarget("auto")._create(job, Code("a", b"x", (), ()), tmp_path, "1")
    assert store.list("") == []


@pytest.mark.parametrize("is_rejected", [False, True])
def test_submit_returns_when_the_cluster_has_the_job_or_rejects_it(
    is_rejected: bool, holdfast: Holdfast, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Api:
        def __init__(self, _address: str) -> None:
            return None

        def running(self, _key: str, _value: str) -> None:
            return None

        def submit(self, name: str, *_: object) -> str:
            return name

        def wait(self, _name: str) -> tuple[jobs_api.Outcome, str]:
            return jobs_api.Outcome("FAILED", "", 2), "a note\nerror: demo: is taken\n"

    controller = None if is_rejected else state_api.ControllerProcess("node", 1)
    monkeypatch.setattr(state_api.StateApi, "__init__", lambda *_: None)
    monkeypatch.setattr(state_api.StateApi, "controller", lambda *_: controller)
    monkeypatch.setattr(jobs_api, "JobsApi", Api)
    result = holdfast("submit", write(RECIPE), "--ray", "http://head:8265")
    if is_rejected:
        assert result.code == 2 and result.err.endswith("\nerror: demo: is taken\n")
        return
    assert result.code == 0, result.err
    assert "watch it with `holdfast attach demo --ray http://head:8265`" in result.out
    assert "--address http://head:8265`" in result.err
