"""Zombies that no other code waits for."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from holdfast.workers.agent.linux import processes


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
    assert not processes.is_ending(child.pid)
    child.communicate(b"\n")
    assert child.returncode == 0
    assert processes.is_ending(child.pid), "there is none any more"
