"""A job's pip environment that cannot be made. Ray first copies the whole Python environment, which
has gigabytes with torch: here it is a small one that imports from this one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from ..local.local_rig import spec
from .headed_cluster import HeadedCluster
from .jobs import holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_pip_environment_that_cannot_be_made_is_reported_in_pips_words(tmp_path: Path) -> None:
    small = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", small], check=True)
    (packages,) = small.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    file, env = tmp_path / "job.yaml", tmp_path / "env.yaml"
    file.write_text(yaml.safe_dump(spec("no-wheel", 12)))
    wheel = str(tmp_path / "nowhere-1.0-py3-none-any.whl")
    env.write_text(yaml.safe_dump({"pip": [wheel]}))
    cluster = HeadedCluster(nodes=0, dashboard=True, python=small / "bin" / "python")
    try:
        done = holdfast(
            "run", str(file), "--ray", cluster.dashboard, "--runtime-env", str(env),
        )  # fmt: skip
    finally:
        cluster.close()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "could not build the job's runtime env, nothing was started" in done.stderr
    assert wheel in done.stderr
