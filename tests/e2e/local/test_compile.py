"""torch.compile: what one worker compiled, the one after it reads from the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .local_rig import Job, spec

COMPILERS = ("g++", "clang++", "c++")

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)),
    reason=f"torch.compile on a CPU needs a C++ compiler: one of {', '.join(COMPILERS)}",
)
pytestmark = [pytest.mark.e2e, needs_compiler]

KINDS = ("fxgraph", "aotautograd")
"""Directories of inductor's cache with an entry for each graph that was compiled."""


def entries(cache: Path) -> set[str]:
    found = (path for kind in KINDS for path in (cache / kind).rglob("*") if path.is_file())
    return {str(path.relative_to(cache)) for path in found}


def test_a_recovery_compiles_nothing_again(tmp_path: Path) -> None:
    document = spec("compiled", 10**6, nodes={"min": 1, "max": 1}, workersPerNode=1)
    document["spec"]["entrypoint"]["recipe"]["config"]["compile"] = True
    document["spec"]["parallelism"] = {"shard": 1}
    job = Job(tmp_path, document)
    cache = job.home / "cache" / "inductor"
    job.run()
    try:
        job.until(lambda view: view.step >= 3)
        compiled = entries(cache)
        assert {name.split("/")[0] for name in compiled} == set(KINDS), "no block was compiled"
        job.kill(job.worker_pids()[0])
        view = job.running(incidents=1)
        assert view.incidents[-1].restored_from == "memory"
        assert entries(cache) == compiled
    finally:
        job.end()
