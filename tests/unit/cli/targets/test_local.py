"""Starting jobs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.cli.targets import local
from holdfast.orchestrator.runtime.job_directory import Home

from ..conftest import Holdfast
from ..test_bad_input import SCRIPT

Write = Callable[[str], Path]
FAIL = "print('error: spec.a: got error: x\\n  fix it'); sys.exit(2)"


@pytest.mark.parametrize(
    ("controller", "code", "text"),
    [
        (FAIL, 2, "error: spec.a: got error: x\n  fix it\n"),
        (f"(job / 'journal').mkdir(); {FAIL}", 1, "take the job over with `holdfast attach demo`"),
        ("os.kill(os.getppid(), 2); time.sleep(1)", 130, "Ctrl-C: job demo goes on; `holdfast att"),
    ],
)
def test_a_job_is_submitted_once_its_controller_answers(
    controller: str, code: int, text: str, holdfast: Holdfast, write: Write,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    program = "import os, pathlib, sys, time; job = pathlib.Path(sys.argv[5], 'jobs', sys.argv[2])"
    command = [sys.executable, "-c", f"{program}; {controller}"]
    monkeypatch.setattr(local.python_command, "start", lambda module: command)
    result = holdfast("submit", write(SCRIPT))
    assert result.code == code and text in result.err
    assert [job.name for job in Home(tmp_path / "home").list()] == ["demo"] * (code != 2)


def test_a_job_is_checked_after_the_fork(
    holdfast: Holdfast, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage libraries start threads, which a fork loses."""
    monkeypatch.setattr(local, "supervise", lambda what: sys.exit(77))
    assert holdfast("run", write(SCRIPT + "  workingDirectory: missing\n")).code == 77
