"""The wheel: built, installed into a clean virtual environment and used from an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from images.build import distributions

from .local_rig import BOUND_S, spec

pytestmark = pytest.mark.e2e


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=2 * BOUND_S,
    )  # fmt: skip


def test_a_wheel_installs_one_package_and_runs_a_job_from_an_empty_directory(
    tmp_path: Path,
) -> None:
    wheel = distributions(tmp_path)
    # Its packages are those of the tests, but for Holdfast: an editable install is not found
    # through a .pth file.
    environment = tmp_path / "environment"
    done = run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bin = environment / "bin"
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(bin / "python", "-c", "import holdfast", cwd=empty).returncode != 0
    before = {path.name for path in packages.iterdir()}
    words = ["--python", bin / "python", "install", "--no-deps", "--no-index", "--quiet", wheel]
    done = run(sys.executable, "-m", "pip", *words, cwd=empty)
    assert done.returncode == 0, done.stderr
    installed = {path.name for path in packages.iterdir()} - before
    assert {name for name in installed if not name.endswith(".dist-info")} == {"holdfast"}
    assert (packages / "holdfast/py.typed").exists(), "a type checker uses the types"

    shown = run(bin / "holdfast", "--version", cwd=empty)
    assert shown.returncode == 0 and "holdfast 0." in shown.stdout, shown.stderr
    shown = run(bin / "kubectl-holdfast", "--help", cwd=empty)
    assert shown.returncode == 0 and "Usage: kubectl holdfast" in shown.stdout, shown.stderr
    for name in ("orchestrator", "workers", "session"):
        done = run(bin / "python", "-c", f"import {name}", cwd=empty)
        assert f"No module named '{name}'" in done.stderr

    one_node = {"nodes": {"min": 1, "max": 1}, "parallelism": {}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec("wheel", 4, **one_node)))
    home = tmp_path / "home"
    done = run(bin / "holdfast", "run", tmp_path / "job.yaml", "--home", home, cwd=empty)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    done = run(bin / "holdfast", "checkpoint", "verify", "wheel", "--home", home, cwd=empty)
    assert done.returncode == 0 and "is intact" in done.stdout, done.stderr
    assert list(empty.iterdir()) == []
