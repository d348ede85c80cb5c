"""What a step frees is there for the next one, without the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import os, resource
from workers.agent import allocator
if {kept}:
    allocator.keep_freed_memory(os.environ)

def step():
    blocks = [b"x" * (3 * 2**20 + i) for i in range(16)]  # filled, so each page is touched

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_A_STEP = 16 * 3 * 2**20 // os.sysconf("SC_PAGESIZE")


def faults(*, kept: bool, **environment: str) -> int:
    """Page faults of ten steps. A process of its own: limits hold for a whole process."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(kept=kept)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")


def test_memory_that_a_step_freed_is_used_again() -> None:
    assert faults(kept=False) > PAGES_A_STEP  # so there is something to gain
    assert faults(kept=True) < PAGES_A_STEP / 10


def test_limits_in_the_environment_win_and_nonsense_there_is_passed_over() -> None:
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    assert faults(kept=True, **small) > 5 * PAGES_A_STEP
    assert faults(kept=True, MALLOC_TRIM_THRESHOLD_="much") < PAGES_A_STEP / 10
    assert faults(kept=True, GLIBC_TUNABLES="glibc.malloc.perturb=0") > PAGES_A_STEP
