"""`holdfast logs`: the files and lines that it prints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.cli.log_files import PART_BYTES, LogTail, follow_files, print_files
from holdfast.orchestrator.cli.targets.remote_job import RemoteJob
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from holdfast.orchestrator.runtime.observe.view import Incident, JobView
from holdfast.workers.agent.linux import output

from .conftest import Holdfast
from .targets.test_remote_job import JOB


@pytest.fixture
def directory(tmp_path: Path, holdfast: Holdfast) -> JobDirectory:
    """Two generations, two ranks, one node; the newest rank 1 ends without a newline."""
    found = Home().create(job_from_mapping(JOB), tmp_path)
    for generation in (1, 2):
        for rank in (0, 1):
            path = found.rank_log(generation, rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"generation {generation}\nlast words of {rank}")
    (found.logs / "agent-node-0.log").write_text("I am an agent\n")
    return found


@pytest.mark.usefixtures("directory")
def test_without_options_all_workers_of_every_generation(holdfast: Holdfast) -> None:
    assert holdfast("logs", "demo").out.splitlines() == [
        line
        for generation in (1, 2)
        for line in (
            f"== generation {generation} ==",
            f"[0] generation {generation}",
            "[0] last words of 0",
            f"[1] generation {generation}",
            "[1] last words of 1",
        )
    ]


def test_a_rank_of_one_generation_has_no_heading(
    directory: JobDirectory, holdfast: Holdfast
) -> None:
    directory.rank_log(1, 1).unlink()
    assert holdfast("logs", "demo", "--rank", "1").out == "generation 2\nlast words of 1\n"


@pytest.mark.usefixtures("directory")
def test_one_rank_of_an_older_generation(holdfast: Holdfast) -> None:
    out = holdfast("logs", "demo", "--rank", "1", "-g", "1").out
    assert out == "generation 1\nlast words of 1\n"


@pytest.mark.usefixtures("directory")
def test_the_log_of_an_agent(holdfast: Holdfast) -> None:
    assert holdfast("logs", "demo", "--node", "node-0").out == "I am an agent\n"


@pytest.mark.usefixtures("directory")
def test_following_ends_when_there_is_no_controller(holdfast: Holdfast) -> None:
    assert "last words of 1" in holdfast("logs", "demo", "-f").out


def test_the_log_of_a_rank_that_no_longer_exists_is_followed_to_the_end(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job continues with one rank at the second poll."""
    path, looks = directory.rank_log(3, 0), itertools.count()

    def alive() -> bool:
        if next(looks) == 0:
            return True
        path.parent.mkdir()
        path.write_text("alone\n")
        return False

    monkeypatch.setattr(directory, "controller_alive", alive)
    follow_files(directory, 1, None, None, 0.0)
    assert capsys.readouterr().out == "generation 2\nlast words of 1\n"


def test_a_log_is_read_in_parts(
    directory: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"step {number}\n" for number in range(PART_BYTES // 4))
    long = "x" * (3 * PART_BYTES)  # longer than a part
    directory.rank_log(2, 0).write_text(f"{lines}{long}\nend")
    parts = list(LogTail(directory.rank_log(2, 0), "").parts(all=True))
    assert max(len("".join(part)) for part in parts) <= 2 * PART_BYTES
    assert "".join(text for part in parts for text in part) == (
        lines.replace("\n", "") + long + "end"
    )
    print_files(directory, 0, 2, None)
    assert capsys.readouterr().out.startswith(lines)


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--rank", "7", "--rank: got 7; expected one of 0, 1"),
        ("-g", "9", "--generation: got 9; expected one of 1, 2"),
        ("--node", "node-9", "--node: got node-9; expected one of node-0"),
    ],
)
def test_a_missing_log_is_reported_with_the_existing_ones(
    option: str, value: str, message: str, holdfast: Holdfast
) -> None:
    result = holdfast("logs", "demo", option, value)
    assert result.code == 2
    assert message in result.err


def test_a_job_without_logs(tmp_path: Path, holdfast: Holdfast) -> None:
    Home().create(job_from_mapping(JOB), tmp_path)
    result = holdfast("logs", "demo")
    assert result.code == 2
    assert result.err == "error: job demo: there are no logs yet\n"


def test_a_rotated_log_is_followed_without_losing_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_text("one\ntwo\n")
    tail = LogTail(log, "")
    assert list(tail.parts()) == [["one", "two"]]
    log.with_name("rank-00000.log.1").write_text("one\ntwo\nthree\n")
    log.write_text("four\n")
    assert list(tail.parts()) == [["three"], ["four"]]


def test_of_a_progress_bar_the_last_state_is_printed(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_bytes(b"start\r\n10%|#   |\r50%|##  |\r100%|####|\nend\n")
    assert list(LogTail(log, "[0] ").parts()) == [["[0] start", "[0] 100%|####|", "[0] end"]]


def test_the_log_of_the_worker_that_failed(
    directory: JobDirectory, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    incidents: list[Incident] = []
    view = JobView(name="demo", incidents=incidents)
    monkeypatch.setattr(RemoteJob, "view", lambda self: view)
    none = holdfast("logs", "demo", "--failed")
    assert none.code == 2
    assert "--failed: got demo; expected a job with a failure" in none.err
    fields = {"at_ns": 0, "world_size_before": 2}
    incidents += [
        Incident(number=1, failure_class="user", title="worker 1 failed", culprit_rank=1,
                 generation_before=1, **fields),
        Incident(number=2, failure_class="resize", title="resize", generation_before=2, **fields),
    ]  # fmt: skip
    found = holdfast("logs", "demo", "--failed")
    assert found.out == "generation 1\nlast words of 1\n"
    assert "generation 1: worker 1 failed" in found.err
    assert "expected it alone" in holdfast("logs", "demo", "--failed", "-f").err


def test_the_older_part_of_a_rotated_log_is_printed_first(
    directory: JobDirectory, holdfast: Holdfast
) -> None:
    log = directory.rank_log(2, 0)
    log.write_text("one\ntw")
    assert output.rotate(log, 0)
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert holdfast("logs", "demo", "--rank", "0", "-g", "2").out == "one\ntwo\nthree\n"
    assert holdfast("logs", "demo", "--rank", "0", "-f").out == "one\ntwo\nthree\n"


def test_a_log_is_followed_where_its_older_part_found_no_room(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_text("one\ntwo\n")
    tail = LogTail(log, "")
    assert list(tail.parts()) == [["one", "two"]]
    log.write_text("three\n")
    assert list(tail.parts()) == [["three"]]


def test_a_generation_that_begins_and_ends_between_two_looks_is_followed(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = itertools.count()

    def alive() -> bool:
        if next(looks) == 0:
            return True
        for generation in (3, 4):
            directory.rank_log(generation, 0).parent.mkdir()
            directory.rank_log(generation, 0).write_text(f"short {generation}\n")
        return False

    monkeypatch.setattr(directory, "controller_alive", alive)
    follow_files(directory, 0, None, None, 0.0)
    assert capsys.readouterr().out == "generation 2\nlast words of 0\nshort 3\nshort 4\n"


def test_a_failure_whose_log_is_gone_is_refused_by_the_name_of_the_option(
    directory: JobDirectory, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident = Incident(number=1, failure_class="user", title="worker 5 failed", culprit_rank=5,
                        generation_before=1, at_ns=0, world_size_before=6)  # fmt: skip
    monkeypatch.setattr(RemoteJob, "view", lambda self: JobView(name="demo", incidents=[incident]))
    result = holdfast("logs", "demo", "--failed")
    assert result.code == 2
    assert "--failed: got no line of rank 5 in generation 1; expected one; it printed" in result.err
    assert "see `holdfast logs demo`" in result.err
    assert "--rank" not in result.err and "--generation" not in result.err
