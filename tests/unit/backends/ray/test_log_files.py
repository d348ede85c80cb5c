"""Which log files of a Ray node are read: those that somebody asked for, and of others the name."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.backends.ray import cluster, logs
from holdfast.orchestrator.backends.ray.logs import Which
from holdfast.orchestrator.hosts.local.job_directory import JobDirectory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDirectory:
    """Two generations of two ranks, and an agent."""
    found = JobDirectory(tmp_path)
    monkeypatch.setattr(cluster, "log_directory", lambda job, job_id: found.logs)
    for generation in (9, 10):
        for rank in (1, 11):
            path = found.rank_log(generation, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{generation} {rank}")
    (found.logs / "agent-node-0.log").write_text("agent")
    return found


def read(which: Which, offsets: dict[str, int]) -> dict[str, bytes]:
    """What is fetched, by its content's place."""
    parts = logs._read("job", "id", which, offsets)
    for identity, _path, data in parts:
        offsets[identity] = offsets.get(identity, 0) + len(data)
    return {path: data for _identity, path, data in parts}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        (Which(None, None, None), {b"10 1", b"10 11"}),
        (Which(1, None, None), {b"10 1"}),
        (Which(11, 9, None), {b"9 11"}),
        (Which(None, None, "node-0"), {b"agent"}),
        (Which(2, None, None), set()),
        (Which(None, 7, None), set()),
    ],
)
def test_the_content_of_what_is_wanted_and_the_names_of_all(
    which: Which, wanted: set[bytes]
) -> None:
    found = read(which, {})
    assert {data for data in found.values() if data} == wanted
    assert len(found) == 5, "whoever asks for what is not there is told what is"


def test_the_last_words_of_a_generation_are_read_when_there_is_another(place: JobDirectory) -> None:
    offsets: dict[str, int] = {}
    read(Which(1, None, None), offsets)
    with place.rank_log(10, 1).open("a") as file:
        file.write(", the end")
    place.rank_log(11, 1).parent.mkdir()
    place.rank_log(11, 1).write_text("11 1")
    assert sorted(read(Which(1, None, None), offsets).values()) == [b", the end", b"11 1"]
    assert read(Which(1, None, None), offsets) == {}


def test_a_ray_node_that_has_run_nothing_of_the_job_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "log_directory", lambda job, job_id: tmp_path / "none")
    assert read(Which(1, None, None), {}) == {}
