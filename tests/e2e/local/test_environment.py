"""`spec.environment`: packages that the script needs, installed without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.workers.agent.process.test_package_install import OFFLINE, wheel

from .local_rig import Job
from .test_entrypoints import job, log_of

pytestmark = pytest.mark.e2e

SCRIPT = """
import os
import hftiny
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("has", hftiny.VERSION, os.environ["VIRTUAL_ENV"], flush=True)
dist.destroy_process_group()
"""


def job_with(place: Path, name: str, *lines: str) -> Job:
    (place / "train.py").write_text(SCRIPT)
    wheel(place / "wheels", "hftiny", "1.0", "torch")
    environment = {"requirements": [*OFFLINE, *lines]}
    return job(place, name, {"script": "train.py"}, environment=environment)


def test_workers_have_the_packages_of_the_job(tmp_path: Path) -> None:
    found = job_with(tmp_path, "packages", "hftiny")
    try:
        found.run()
        assert found.wait().state == "succeeded", found.output()
        assert "has 1.0 " in log_of(found, 0)
    finally:
        found.end()


def test_what_cannot_be_installed_fails_the_job_with_the_installers_words(tmp_path: Path) -> None:
    found = job_with(tmp_path, "missing", "no-such-package-of-anyone")
    try:
        found.run()
        view = found.wait()
        assert view.state == "failed"
        assert "spec.environment" in view.reason and "no-such-package-of-anyone" in view.reason
        assert view.generation <= 2, "it does not change by a restart"
    finally:
        found.end()
