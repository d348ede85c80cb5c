"""Atomic replacement of files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.files import PRIVATE, replace, replacing, write_all


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace(path, b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        write_all(file, b"new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace(path, b"old")
    with replacing(path) as file:
        write_all(file, b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_the_contents_are_durable_before_the_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", list[tuple[str, bool]]()
    sync = os.fsync

    def fsync(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, path.exists()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    replace(path, b"data")
    assert synced == [(f".file.{os.getpid()}.tmp", False), (tmp_path.name, True)]


def test_a_name_that_cannot_be_made_durable_is_an_error_with_the_new_file_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace(path, b"old")

    def fail(directory: Path) -> None:
        raise OSError

    monkeypatch.setattr(files, "sync_directory", fail)
    with pytest.raises(OSError):
        replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        replace(tmp_path / "shared", b"")
        replace(tmp_path / "private", b"", PRIVATE)
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "private")]
    assert modes == [0o644, 0o600]


def test_a_file_that_accepts_partial_writes_gets_all_data() -> None:
    class Slow:
        taken = b""

        def write(self, data: memoryview) -> int:
            self.taken += bytes(data[:3])
            return min(3, len(data))

    file = Slow()
    write_all(file, b"0123456789")
    assert file.taken == b"0123456789"
