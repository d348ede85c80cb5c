"""What a step frees is there for the next one, without the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.unit.protocol import test_environment as of_jobs

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")

STEPS = """
import os, resource
from holdfast.workers.agent.linux import malloc as allocator
os.environ.update({environment})
allocator.adopt(os.environ)

def step():
    blocks = [b"x" * (3 * 2**20 + i) for i in range(16)]  # filled, so each page is touched

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_A_STEP = 16 * 3 * 2**20 // os.sysconf("SC_PAGESIZE")


def faults(environment: dict[str, str]) -> int:
    """Page faults of ten steps. A process of its own: limits hold for a whole process."""
    code = STEPS.format(environment=environment)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_that_a_step_freed_is_used_again_with_what_holdfast_sets() -> None:
    ours = of_jobs.environment(of_jobs.make_job())
    assert faults({}) > PAGES_A_STEP  # so there is something to gain
    assert faults(ours) < PAGES_A_STEP / 10


def test_limits_may_be_others_and_one_that_is_no_number_is_passed_over() -> None:
    assert faults({"MALLOC_MMAP_THRESHOLD_": "65536"}) > 5 * PAGES_A_STEP
    assert faults({"MALLOC_TRIM_THRESHOLD_": "much"}) > PAGES_A_STEP
