"""Zombies that no other code waits for, and the warning about memory."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from holdfast.workers.agent.linux import processes
from holdfast.workers.agent.storage.memfd import MAX_BUFFER_SHARE, memory_warning


def test_a_zombie_is_reaped_when_it_is_seen_twice() -> None:
    """Other code may be about to wait for a new zombie."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [])
    os.close(pidfd)
    assert pid in processes.reap_strays(set())
    assert processes.state_of(pid) == "Z"
    assert pid not in processes.reap_strays({pid})
    assert processes.state_of(pid) == ""


def test_live_children_are_not_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid not in processes.reap_strays({child.pid})
    child.communicate(b"\n")
    assert child.returncode == 0


def test_buffers_that_leave_too_little_memory_are_reported_with_the_fix() -> None:
    limit = 10 * 10**9
    assert memory_warning(int(MAX_BUFFER_SHARE * limit), limit) == ""
    text = memory_warning(9 * 10**9, limit)
    assert "9.0 GB of the 10.0 GB" in text and "spec.resources.memory" in text
