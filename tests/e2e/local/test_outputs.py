"""A job's exit code does not depend on what its output can take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.hosts.local.job_records import read_view
from holdfast.orchestrator.runtime.job_directory import Home

from .local_rig import short

pytestmark = pytest.mark.e2e

CLOSED = {
    "ascii": ("PYTHONIOENCODING=ascii", ""),
    "latin-1": ("PYTHONIOENCODING=latin-1", ""),
    "closed": ("", "<&- >&- 2>&-"),
    "full": ("", ">/dev/full"),
    "unread": ("", "| true; exit ${PIPESTATUS[0]}"),
}


@pytest.mark.parametrize("how", CLOSED)
def test_a_job_that_succeeds_ends_with_0(how: str, tmp_path: Path) -> None:
    """The report has bars of block characters."""
    before, after = CLOSED[how]
    (tmp_path / "train.py").write_text("print('caf\u00e9 \u2581')\n")
    line = f"{before} {sys.executable} -m holdfast.orchestrator.cli.main run train.py {after}"
    home = Home(short(tmp_path / "home"))
    environment = {**os.environ, "HOLDFAST_HOME": str(home.path)}
    command = ["bash", "-c", line]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert read_view(home.find("train")).state == "succeeded"
