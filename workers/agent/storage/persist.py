"""Copies a staged buffer to a durable file of the storage tier and hashes it on the way.

Runs in a thread of the agent, so that training never waits for storage.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast.orchestrator.protocol.facts import CoverageSum, StagedShard
from holdfast.orchestrator.protocol.files import make_directory, sync_directory, write_all
from holdfast.orchestrator.protocol.manifest import NOTE_SUFFIX, ShardNote, encode_note
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint.coverage import coverage_of_file
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles

from .memfd import Memfd

CHUNK_BYTES = 4 * 2**20


class Written(NamedTuple):
    checksum: str
    """xxh3_128 of the file, hex."""
    coverage: CoverageSum
    """Sums of the values that the file holds."""


def write_shard(
    memory: Memfd, num_bytes: int, checkpoint_path: str, directory: str, name: str
) -> Written:
    """Copy the first `num_bytes` of `memory` to a durable file.

    Raises OSError, or what the store's library raises, when the file is not durable.
    """
    store = CheckpointFiles(checkpoint_path)
    checksum = _write(memory.fd, num_bytes, store, directory, name)
    if store.is_local:
        sync_directory(Path(store.root))
    return Written(checksum, coverage_of_file(memory.fd))


def note_of(staged: StagedShard, file: str, done: Written, mesh: Mesh) -> bytes:
    """Note for the next controller about a file that no controller gets a report of."""
    return encode_note(ShardNote(file=staged.written(file, *done), mesh=mesh))


def write_note(note: bytes, checkpoint_path: str, directory: str, name: str) -> None:
    """Write the note of a durable shard file. Raises as write_shard."""
    with CheckpointFiles(checkpoint_path).writing(f"{directory}/{name}{NOTE_SUFFIX}") as file:
        write_all(file, note)


def _write(fd: int, num_bytes: int, store: CheckpointFiles, directory: str, name: str) -> str:
    """A failed write leaves no empty directory, or a full disk would collect one per attempt."""
    try:
        with contextlib.suppress(FileNotFoundError):
            return _write_file(fd, num_bytes, store, directory, name)
        # Another rank failed, and removed the directory before this file was in it.
        return _write_file(fd, num_bytes, store, directory, name)
    except BaseException:
        if store.is_local:
            with contextlib.suppress(OSError):  # another rank has written into it
                Path(store.root, directory).rmdir()
        raise


def _write_file(fd: int, num_bytes: int, store: CheckpointFiles, directory: str, name: str) -> str:
    make_directory(store.filesystem, f"{store.root}/{directory}")
    with store.writing(f"{directory}/{name}") as file:
        return _copy(fd, num_bytes, file)


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
