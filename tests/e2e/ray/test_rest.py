"""The actors of a job do not take the processor from its training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .jobs import Job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
WINDOW_S = 4.0


class Plain:
    """As Ray has it."""

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("ray"), "resting", 1_000_000)
    try:
        job.running()
        yield job
    finally:
        job.end()


def wakes(pid: int) -> int:
    """How often the main thread of a process has waited so far."""
    for line in Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError(pid)


def test_the_main_threads_of_its_actors_rest(job: Job) -> None:
    import ray

    plain: Any = ray.remote(Plain).options(num_cpus=0).remote()
    pids = {"plain": ray.get(plain.pid.remote()), "controller": job.controller()["pid"]}
    pids |= {node: job.facts(node)["actor_pid"] for node in job.members()}
    assert len(pids) == 4
    before = {name: wakes(pid) for name, pid in pids.items()}
    time.sleep(WINDOW_S)
    woken = {name: wakes(pid) - before[name] for name, pid in pids.items()}
    often = woken.pop("plain")
    assert all(count < often / 2 for count in woken.values()), (often, woken)
