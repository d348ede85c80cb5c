"""The directory of an agent's secrets, with the processes that own it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from holdfast.orchestrator.backends.ray.secret_dir import PrivateDirectory

JOB, ANOTHER = "0123456789abcdef", "fedcba9876543210"
OWNER = """
import sys, pathlib
from holdfast.orchestrator.backends.ray.secret_dir import PrivateDirectory
own = PrivateDirectory(sys.argv[1], pathlib.Path(sys.argv[2]))
own.write("token", b"secret")
print(own.path, flush=True)
sys.stdin.read()
"""


def owner(job_id: str, parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a directory of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, job_id, str(parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    own = PrivateDirectory(JOB, tmp_path)
    own.write("token", b"secret")
    assert (own.path / "token").read_bytes() == b"secret"
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((own.path / "token").stat().st_mode) == 0o600
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed, left = owner(JOB, tmp_path)
    running, theirs = owner(JOB, tmp_path)
    other, of_another_job = owner(ANOTHER, tmp_path)
    end(killed)
    end(other)
    for name in ("holdfast-logs-abc", f"x-holdfast-{JOB}-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").touch()
    own = PrivateDirectory(JOB, tmp_path)
    assert not left.exists() and not of_another_job.exists(), "their owners have ended"
    assert (theirs / "token").read_bytes() == b"secret", "its owner lives"
    assert sorted(tmp_path.iterdir()) == sorted(
        [theirs, own.path, tmp_path / "holdfast-logs-abc", tmp_path / f"x-holdfast-{JOB}-abc"]
    ), "what has another name is somebody else's"
    end(running)
    own.remove()


def test_a_pipe_of_somebody_else_holds_nobody_up(tmp_path: Path) -> None:
    theirs = tmp_path / f"holdfast-{ANOTHER}-abc"
    theirs.mkdir()
    os.mkfifo(theirs / "owner")
    PrivateDirectory(JOB, tmp_path).remove()
    assert list(tmp_path.iterdir()) == [theirs]
