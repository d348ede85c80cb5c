"""`holdfast logs`: which files, which lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.protocol.spec import job_from_mapping
from orchestrator.runtime.home import Home, JobDirectory

from .conftest import Holdfast
from .test_client import JOB


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
def test_without_options_all_workers_of_the_newest_generation(holdfast: Holdfast) -> None:
    assert holdfast("logs", "demo").out.splitlines() == [
        "[0] generation 2",
        "[0] last words of 0",
        "[1] generation 2",
        "[1] last words of 1",
    ]


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


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--rank", "7", "--rank: got 7; expected one of 0, 1"),
        ("-g", "9", "--generation: got 9; expected one of 1, 2"),
        ("--node", "node-9", "--node: got node-9; expected one of node-0"),
    ],
)
def test_what_is_not_there_is_named_beside_what_is(
    option: str, value: str, told: str, holdfast: Holdfast
) -> None:
    result = holdfast("logs", "demo", option, value)
    assert result.code == 2
    assert told in result.err


def test_a_job_without_logs(tmp_path: Path, holdfast: Holdfast) -> None:
    Home().create(job_from_mapping(JOB), tmp_path)
    result = holdfast("logs", "demo")
    assert result.code == 2
    assert "there is none yet" in result.err
