"""The rig leaves nothing behind. That its faults are real, the tests of jobs show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.run import REPOSITORY, Run, is_running, leftovers
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = pytest.mark.e2e

# A program that starts a cluster, prints its name and waits to be killed.
KILLED_LATER = """
import signal
from tests.e2e.kubernetes.rig.binaries import locate
from tests.e2e.kubernetes.rig.cluster import Cluster
from tests.e2e.kubernetes.rig.run import Run
run = Run()
Cluster(run, locate()).start(1)
print(run.name, flush=True)
signal.pause()
"""

# A run with one process; prints the name of the run and both process ids.
KILLED_WITH_KEEPER = """
import signal
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.run import Run
run = Run()
server = Server(run, "sleeper", ["sleep", "600"])
server.start()
print(run.name, run.keeper_pid, server.pid, flush=True)
signal.pause()
"""


def test_a_stopped_control_plane_leaves_nothing(
    control_plane: ControlPlane | GivenCluster, binaries: programs.Binaries
) -> None:
    if refusal := binaries.refusal(programs.CONTROL_PLANE):
        pytest.skip(refusal)
    with Run() as run:
        ControlPlane(run, binaries).start()
        assert leftovers(run.name) != []
    assert leftovers(run.name) == []


def test_a_cluster_of_killed_tests_leaves_nothing(
    node_binaries: programs.Binaries,
) -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", KILLED_LATER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    name = tests.stdout.readline().strip()
    assert name and any("cgroup" in left for left in leftovers(name))
    tests.kill()
    tests.wait()
    until(
        lambda: leftovers(name) == [],
        "the keeper to remove everything",
        timeout_s=60,
        last=lambda: leftovers(name),
    )


def test_the_next_run_cleans_up_after_a_run_with_a_killed_keeper() -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", KILLED_WITH_KEEPER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    name, keeper, sleeper = tests.stdout.readline().split()
    os.kill(int(keeper), signal.SIGKILL)
    tests.kill()
    tests.wait()
    assert f"process {sleeper}" in leftovers(name)
    with Run():
        assert leftovers(name) == []
    until(lambda: not is_running(int(sleeper)), "the process to be gone", timeout_s=10)
