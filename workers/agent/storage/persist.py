"""Copies a staged buffer to a durable file of the storage tier and hashes it on the way.

Runs in a thread of the agent, so that training never waits for storage.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import xxhash

from holdfast.orchestrator.protocol.facts import CoverageSum, StagedShard
from holdfast.orchestrator.protocol.files import (
    is_local,
    make_directory,
    replace,
    replacing,
    sync_directory,
    write_all,
)
from holdfast.orchestrator.protocol.manifest import NOTE_SUFFIX, ShardNote, encode_note
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint.coverage import coverage_of_file

CHUNK_BYTES = 4 * 2**20


class Written(NamedTuple):
    checksum: str
    """xxh3_128 of the file, hex."""
    coverage: CoverageSum
    """Sums of the values that the file holds."""


def write_shard(
    fd: int, num_bytes: int, checkpoint_path: str, directory: str, name: str
) -> Written:
    """Copy the first `num_bytes` of `fd` to a durable file. Takes over `fd`.

    Raises OSError, or what the store's library raises, when the file is not durable.
    """
    try:
        system, root = fsspec.url_to_fs(checkpoint_path)
        if is_local(system):
            checksum = _write_local(fd, num_bytes, Path(root) / directory, name)
        else:
            path = f"{root.rstrip('/')}/{directory}/{name}"
            checksum = _write_store(fd, num_bytes, system, path)
        return Written(checksum, coverage_of_file(fd))
    finally:
        os.close(fd)


def note_of(staged: StagedShard, file: str, done: Written, mesh: Mesh) -> bytes:
    """Note for the next controller about a file that no controller gets a report of."""
    return encode_note(ShardNote(file=staged.written(file, *done), mesh=mesh))


def write_note(note: bytes, checkpoint_path: str, directory: str, name: str) -> None:
    """Write the note of a durable shard file. Raises as write_shard."""
    system, root = fsspec.url_to_fs(checkpoint_path)
    path = f"{root.rstrip('/')}/{directory}/{name}{NOTE_SUFFIX}"
    if is_local(system):
        replace(Path(path), note)
    else:
        system.pipe_file(path, note)


def _write_local(fd: int, num_bytes: int, directory: Path, name: str) -> str:
    """A failed write leaves no empty directory, or a full disk would collect one per attempt."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        checksum = _write_file(fd, num_bytes, directory, name)
    except BaseException:
        with contextlib.suppress(OSError):  # another rank has written into it
            directory.rmdir()
        raise
    sync_directory(directory.parent)
    return checksum


def _write_file(fd: int, num_bytes: int, directory: Path, name: str) -> str:
    with contextlib.suppress(FileNotFoundError), replacing(directory / name) as file:
        return _copy(fd, num_bytes, file)
    # Another rank failed, and removed the directory before this file was in it.
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / name) as file:
        return _copy(fd, num_bytes, file)


def _write_store(fd: int, num_bytes: int, system: Any, path: str) -> str:
    """An object store shows an object only when its upload is complete."""
    make_directory(system, path.rsplit("/", 1)[0])
    file = system.open(path, "wb")
    try:
        checksum = _copy(fd, num_bytes, file)
    except BaseException:
        # close() would complete the upload of a partial shard.
        with contextlib.suppress(Exception):
            file.discard()
        file.closed = True  # its destructor would close it
        raise
    file.close()
    return checksum


def _copy(fd: int, num_bytes: int, file: Any) -> str:
    digest = xxhash.xxh3_128()
    at = 0
    while at < num_bytes:
        chunk = os.pread(fd, min(CHUNK_BYTES, num_bytes - at), at)
        if not chunk:
            raise OSError(f"the buffer ends at byte {at} of {num_bytes}")
        digest.update(chunk)
        write_all(file, chunk)
        at += len(chunk)
    return digest.hexdigest()
