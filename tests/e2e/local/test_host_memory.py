"""Agents in a memory control group that is too small for all buffers and buddy copies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.cli.render import fact_lines
from holdfast.orchestrator.protocol import cgroup

from .local_rig import Job, spec

pytestmark = pytest.mark.e2e

MIB = 2**20
MODEL = {
    "steps": 60,
    "globalBatch": 2,
    "model": {"dim": 512, "numLayers": 3, "numHeads": 4},
    "data": {"sequenceLength": 16},
}
"""10 M parameters: 56 MiB of state for each of two ranks, 112 MiB for one."""


class Group:
    """A memory control group for a command and all that it starts."""

    def __init__(self, directory: Path, version: int, num_bytes: int) -> None:
        self.directory, self._version = directory, version
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (directory / limit).write_text(str(num_bytes))

    def add(self, pid: int) -> None:
        (self.directory / "cgroup.procs").write_text(str(pid))

    @property
    def num_kills(self) -> int:
        here = cgroup.CgroupDirectory(self._version, self.directory, self.directory)
        return cgroup.memory_kills(here)


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[Group]:
    """Skips the test where no control group can be made."""
    own = cgroup.find("memory")
    if own is None:
        pytest.skip("no memory control group is mounted")
    directory = own.top / f"holdfast-test-{os.getpid()}"
    try:
        directory.mkdir()
        group = Group(directory, own.version, num_bytes)
    except OSError as error:
        pytest.skip(f"{directory}: a memory control group cannot be made ({error.strerror})")
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):  # a process is still ending
            directory.rmdir()


@pytest.mark.parametrize(
    ("nodes", "mebibytes", "given_up"),
    [
        pytest.param(1, 1024, ("buffers", "memory-tier"), id="one agent in 1 GiB"),
        # Standbys that have started when it is planned leave less: 64 MiB more for each agent.
        pytest.param(2, 2176, ("copies", "buffers"), id="two agents in 2 GiB"),
    ],
)
def test_a_job_trains_with_what_its_memory_holds_and_says_what_it_gave_up(
    tmp_path: Path, nodes: int, mebibytes: int, given_up: tuple[str, ...]
) -> None:
    document = spec(
        "short", 0, entrypoint={"recipe": {"name": "pretrain", "config": MODEL}},
        nodes={"min": nodes, "max": nodes}, workersPerNode=1, parallelism={"shard": nodes},
        checkpoint={"storage": {"everySteps": 10}, "memory": {"everySteps": "auto"}},
    )  # fmt: skip
    with limited(mebibytes * MIB) as group:
        job = Job(tmp_path, document)
        job.run()
        group.add(job.command.pid)
        try:
            view = job.until(lambda v: v.host_memory is not None and v.step >= 2)
            memory = view.host_memory
            assert memory is not None and memory.given_up in given_up and not memory.buddy
            assert memory.limit_bytes <= mebibytes * MIB // nodes
            # Three buffers and three copies would not have fitted.
            assert memory.usable_bytes < (3 + 3 * (nodes > 1)) * memory.shard_bytes * 2
            shown = {name: str(text) for name, text in fact_lines(view, [])}
            assert shown["host memory"] == memory.text
            end = job.wait()
        finally:
            job.end()
        assert end.state == "succeeded" and not end.incidents
        assert group.num_kills == 0
        assert end.checkpoints[-1].step == 59
