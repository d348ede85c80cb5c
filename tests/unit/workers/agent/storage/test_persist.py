"""Durable files of staged shards."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from holdfast.workers.agent.storage import persist
from holdfast.workers.agent.storage.memfd import Memfd


def _memory(content: bytes) -> Memfd:
    memory = Memfd("test", len(content))
    os.write(memory.fd, content)
    return memory


def _full_disk(fd: int, num_bytes: int, file: object) -> str:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist, "_copy", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        persist.write_shard(_memory(b"abc"), 3, str(tmp_path), "step-00000009.gen-1", "a")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_files_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persist.write_shard(_memory(b"abc"), 3, str(tmp_path), "step-00000009.gen-1", "a")
    monkeypatch.setattr(persist, "_copy", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        persist.write_shard(_memory(b"abc"), 3, str(tmp_path), "step-00000009.gen-1", "b")
    assert [path.name for path in (tmp_path / "step-00000009.gen-1").iterdir()] == ["a"]


def test_a_directory_that_another_rank_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = persist.make_directory, []

    def make_and_remove(system: Any, path: str) -> None:
        make(system, path)
        made.append(path)
        if len(made) == 1:
            Path(path).rmdir()

    monkeypatch.setattr(persist, "make_directory", make_and_remove)
    persist.write_shard(_memory(b"abc"), 3, str(tmp_path), "step-00000009.gen-1", "a")
    assert (tmp_path / "step-00000009.gen-1" / "a").read_bytes() == b"abc"


class _FailingStore(MemoryFileSystem):  # type: ignore[misc]
    """The upload of a file fails."""

    protocol = "failing"

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        return _FailingUpload(self, path, mode)


class _FailingUpload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        raise OSError("no answer")

    def discard(self) -> None:
        self.buffer = None


def test_the_rest_of_a_failed_upload_is_thrown_away_without_an_attempt_to_complete_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The destructor of the file would, and print a traceback."""
    fsspec.register_implementation("failing", _FailingStore, clobber=True)
    monkeypatch.setattr(persist, "_copy", _raise)
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(OSError, match="the buffer"):
        persist.write_shard(_memory(b"abc"), 3, "failing://here", "step-00000009.gen-1", "a")
    gc.collect()
    assert printed == []


def _raise(*_: Any) -> str:
    raise OSError("the buffer ends")
