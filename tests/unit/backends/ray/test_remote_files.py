"""Which log files of a Ray node are read: the requested ones, and the names of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.backends.ray import ray_nodes, remote_files
from holdfast.orchestrator.backends.ray.remote_files import LogFilter
from holdfast.orchestrator.hosts.local.job_directory import JobDirectory


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDirectory:
    """Two generations of two ranks, and an agent."""
    found = JobDirectory(tmp_path)
    monkeypatch.setattr(ray_nodes, "log_directory", lambda job, job_id: found.logs)
    for generation in (9, 10):
        for rank in (1, 11):
            path = found.rank_log(generation, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{generation} {rank}")
    (found.logs / "agent-node-0.log").write_text("agent")
    return found


def read(wanted: LogFilter, offsets: dict[str, int]) -> dict[str, bytes]:
    """Path -> new content."""
    parts = remote_files._read("job", "id", wanted, offsets)
    for identity, _path, data in parts:
        offsets[identity] = offsets.get(identity, 0) + len(data)
    return {path: data for _identity, path, data in parts}


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("wanted", "contents"),
    [
        (LogFilter(None, None, None), {b"10 1", b"10 11"}),
        (LogFilter(1, None, None), {b"10 1"}),
        (LogFilter(11, 9, None), {b"9 11"}),
        (LogFilter(None, None, "node-0"), {b"agent"}),
        (LogFilter(2, None, None), set()),
        (LogFilter(None, 7, None), set()),
    ],
)
def test_requested_files_have_content_and_all_files_have_a_name(
    wanted: LogFilter, contents: set[bytes]
) -> None:
    found = read(wanted, {})
    assert {data for data in found.values() if data} == contents
    assert len(found) == 5, "an error message lists the files that exist"


def test_the_last_lines_of_a_generation_are_read_after_the_next_one_began(
    directory: JobDirectory,
) -> None:
    offsets: dict[str, int] = {}
    read(LogFilter(1, None, None), offsets)
    with directory.rank_log(10, 1).open("a") as file:
        file.write(", the end")
    directory.rank_log(11, 1).parent.mkdir()
    directory.rank_log(11, 1).write_text("11 1")
    assert sorted(read(LogFilter(1, None, None), offsets).values()) == [b", the end", b"11 1"]
    assert read(LogFilter(1, None, None), offsets) == {}


def test_a_ray_node_that_has_run_nothing_of_the_job_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "log_directory", lambda job, job_id: tmp_path / "none")
    assert read(LogFilter(1, None, None), {}) == {}
