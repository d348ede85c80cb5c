"""A copy of a directory has its name when all of it is there, and takes nobody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.orchestrator.hosts.local import fs_utils


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "step-10").mkdir(parents=True)
    (path / "step-10" / "shard").write_text("data")
    return path


def there(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir())


def test_a_copy_has_the_name_once_it_is_durable(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a kill at any moment leaves nothing that looks like the whole."""
    place, before = tmp_path / "kept", list[bool]()
    monkeypatch.setattr(os, "sync", lambda: before.append(place.exists()))
    fs_utils.copy(source, place)
    assert before == [False]
    assert (place / "step-10" / "shard").read_text() == "data"
    assert there(place) == ["kept", "source"]


@pytest.mark.parametrize("names", [[], ["mine"]])
def test_a_directory_that_is_there_is_left_as_it_is(
    tmp_path: Path, source: Path, names: list[str]
) -> None:
    place = tmp_path / "kept"
    place.mkdir()
    for name in names:
        (place / name).write_text("")
    with pytest.raises(FileExistsError):
        fs_utils.copy(source, place)
    assert [path.name for path in place.iterdir()] == names
    assert there(place) == ["kept", "source"]


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, source: Path) -> None:
    (source / "lost").symlink_to("nowhere")
    with pytest.raises(OSError, match="No such file"):
        fs_utils.copy(source, tmp_path / "kept")
    assert there(tmp_path / "kept") == ["source"]
