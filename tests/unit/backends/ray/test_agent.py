"""An agent's actor without Ray, and its secrets' directory. Its process does nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.orchestrator.backends.ray.agent import (
    MAX_WAITERS,
    AgentActor,
    AgentOrder,
    SecretDirectory,
)

BOUND_S = 30.0
ORDER = AgentOrder(
    job="job", node="node-0", slots=1, job_id="0123456789abcdef", token="token", certificate=b"",
    key=b"", address="127.0.0.1", port=1, env={},
)  # fmt: skip
IDLE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


@pytest.fixture
@asynccontextmanager
async def actor(tmp_path: Path) -> AsyncIterator[AgentActor]:
    """An actor, as Ray would make it."""
    actor = AgentActor.__new__(AgentActor)
    await actor.__init__(ORDER, IDLE, tmp_path, tmp_path)  # type: ignore[misc]
    try:
        async with asyncio.timeout(BOUND_S):
            yield actor
    finally:
        await actor.end()


async def test_waiting_calls_of_ended_controllers_return_and_the_newest_get_the_end(
    actor: AgentActor,
) -> None:
    calls = [asyncio.ensure_future(actor.wait_for_end()) for _ in range(3 * MAX_WAITERS)]
    early, newest = calls[:-MAX_WAITERS], calls[-MAX_WAITERS:]
    assert await asyncio.gather(*early) == [None] * len(early)
    assert not any(call.done() for call in newest)
    await actor.end()
    assert await asyncio.gather(*newest) == ["was killed by SIGKILL"] * MAX_WAITERS
    assert await actor.wait_for_end() == "was killed by SIGKILL"


async def test_calls_of_two_live_controllers_do_not_replace_each_other(actor: AgentActor) -> None:
    both = [asyncio.ensure_future(actor.wait_for_end()) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(actor._waiters) == 2
    assert not any(enough.done() for enough in actor._waiters)
    await actor.end()
    assert await asyncio.gather(*both) == ["was killed by SIGKILL"] * 2


# -- the directory of its secrets --------------------------------------------------------------
JOB_ID, OTHER_JOB_ID = "0123456789abcdef", "fedcba9876543210"
OWNER = """
import sys, pathlib
from holdfast.orchestrator.backends.ray.agent import SecretDirectory
own = SecretDirectory(sys.argv[1], pathlib.Path(sys.argv[2]))
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


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_only_its_owner_may_read_a_secret_directory(tmp_path: Path) -> None:
    own = SecretDirectory(JOB_ID, tmp_path)
    own.write("token", b"secret")
    assert (own.path / "token").read_bytes() == b"secret"
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((own.path / "token").stat().st_mode) == 0o600
    own.remove()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_killed_processes_are_removed_by_the_next_process(tmp_path: Path) -> None:
    killed, left = owner(JOB_ID, tmp_path)
    running, kept = owner(JOB_ID, tmp_path)
    other, of_another_job = owner(OTHER_JOB_ID, tmp_path)
    kill(killed)
    kill(other)
    for name in ("holdfast-logs-abc", f"x-holdfast-{JOB_ID}-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").touch()
    own = SecretDirectory(JOB_ID, tmp_path)
    assert not left.exists() and not of_another_job.exists(), "their owners have ended"
    assert (kept / "token").read_bytes() == b"secret", "its owner lives"
    assert sorted(tmp_path.iterdir()) == sorted(
        [kept, own.path, tmp_path / "holdfast-logs-abc", tmp_path / f"x-holdfast-{JOB_ID}-abc"]
    ), "a directory with another name is not ours"
    kill(running)
    own.remove()


def test_a_pipe_of_another_user_does_not_block(tmp_path: Path) -> None:
    other = tmp_path / f"holdfast-{OTHER_JOB_ID}-abc"
    other.mkdir()
    os.mkfifo(other / "owner")
    SecretDirectory(JOB_ID, tmp_path).remove()
    assert list(tmp_path.iterdir()) == [other]
