"""Log files of a Ray node that are read: the requested ones, and the names of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.backends.ray import ray_nodes, remote_files
from holdfast.orchestrator.backends.ray.remote_files import LogFilter
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from holdfast.workers.agent.linux import output


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
    offsets |= {part.identity: part.end for part in parts}
    return {part.path: part.data for part in parts}


def copied(wanted: LogFilter, offsets: dict[str, int], target: Path) -> bool:
    """Append what is new to the copies below `target`; whether there was anything."""
    parts = remote_files._read("job", "id", wanted, offsets)
    return remote_files.append(parts, offsets, target)


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


def test_a_rotated_log_is_copied_whole(
    directory: JobDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent rotates it: twice, also in the middle of a line, in several parts."""
    monkeypatch.setattr(remote_files, "MAX_BYTES", 8)
    wanted, offsets, log = LogFilter(1, None, None), dict[str, int](), directory.rank_log(10, 1)
    copy = JobDirectory(tmp_path / "copy")
    written = ""

    def write(text: str) -> None:
        nonlocal written
        written += text
        with log.open("a") as file:
            file.write(text)

    def looks() -> str:
        while copied(wanted, offsets, copy.logs):
            continue
        return copy.rank_log(10, 1).read_text()

    log.write_text("")
    write("first line\nsecond line\nthi")
    assert output.rotate(log, 0)
    write("rd line\n")
    assert looks() == written, "the older part of a log that was rotated before comes first"
    for number in range(2):
        write(f"a line that is read {number}\n")
        assert looks() == written
        write(f"a line that is moved before it is read {number}\n")
        assert output.rotate(log, 0)
        write(f"short {number}\n")
        assert looks() == written
    assert copied(wanted, offsets, copy.logs) is False
    assert not copy.rank_log(10, 1).with_name("rank-00001.log.1").exists()


def test_a_log_that_lost_its_older_part_is_read_from_its_beginning(directory: JobDirectory) -> None:
    log, wanted, offsets = directory.rank_log(10, 1), LogFilter(1, None, None), dict[str, int]()
    read(wanted, offsets)
    log.write_text("new")  # no room for the older part
    assert read(wanted, offsets) == {"gen-0010/rank-00001.log": b"new"}
    assert read(wanted, offsets) == {}


def test_a_generation_that_began_and_ended_between_two_looks_is_read(
    directory: JobDirectory,
) -> None:
    offsets: dict[str, int] = {}
    read(LogFilter(1, None, None), offsets)
    for generation in (11, 12):
        directory.rank_log(generation, 1).parent.mkdir()
        directory.rank_log(generation, 1).write_text(f"{generation} 1")
    assert list(read(LogFilter(1, None, None, since=10), offsets).values()) == [b"11 1", b"12 1"]
