"""The rig leaves nothing behind. That its faults are real, the tests of jobs show."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.run import REPOSITORY, leftovers
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


def test_a_cluster_of_killed_tests_leaves_nothing(node_binaries: programs.Binaries) -> None:
    tests = subprocess.Popen(
        [sys.executable, "-c", KILLED_LATER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    name = tests.stdout.readline().strip()
    assert name and any("cgroup" in left for left in leftovers(name))
    tests.kill()
    tests.wait()
    until(
        lambda: leftovers(name) == [], "the keeper to remove everything", timeout_s=60,
        last=lambda: leftovers(name),
    )  # fmt: skip
