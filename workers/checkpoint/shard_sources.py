"""Reads parts of one shard file: from a memory file of the agent or from the storage tier. No
torch."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import xxhash

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.files import is_local, read_small, replacing
from holdfast.orchestrator.protocol.manifest import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    parse_directory_name,
)

from .layout import Bytes, DamagedCheckpoint, Entry, Header, header_length, parse_header
from .shard_reading import read_entries


class UnreadableCheckpoint(HoldfastError):
    """A checkpoint that should exist cannot be read now: the store does not answer, or is not
    mounted."""


class MissingCheckpoint(HoldfastError):
    """The store can be read, and this checkpoint is not in it."""


ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""No such file; or a file or a directory in the place of the other."""
NOT_A_FILE = (errno.ENXIO, errno.ELOOP)
"""Errors of opening a socket, and a link to itself."""

TICK_BYTES = 256 * 2**20
"""Progress is reported after so many bytes from memory: a fraction of a second."""


class MappedShard:
    """A shard in a memory file or a local file; only pages that are used are read."""

    def __init__(self, fd: int, num_bytes: int, name: str) -> None:
        """Owns the file descriptor. Raises DamagedCheckpoint if the file is shorter."""
        self.name = name
        try:
            size = os.fstat(fd).st_size
            if size < num_bytes:
                raise DamagedCheckpoint(name, f"{size} bytes; expected {num_bytes}")
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(fd, num_bytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.bytes: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._header: Header | None = None

    def header(self) -> Header:
        if self._header is None:
            header = parse_header(memoryview(self._memory), self.name)
            self._header = _expect_to_fit(header, len(self.bytes), self.name)
        return self._header

    def checksum(self) -> str:
        """xxh3_128 of the whole file, hex."""
        return xxhash.xxh3_128_hexdigest(self.bytes.data)

    def data(self, begin: int, end: int) -> Bytes:
        """The bytes from begin to end, counted from the end of the header."""
        at = self.header().data_start
        return self.bytes[at + begin : at + end]

    def entries(
        self, wanted: Iterable[Entry], tick: Callable[[], None]
    ) -> Iterator[tuple[Entry, Bytes]]:
        """Each of these entries and its bytes, which are valid until the next one; in any order.
        Calls `tick` as it reads."""
        num_bytes = 0
        for entry in wanted:
            yield entry, self.data(entry.begin, entry.end)
            num_bytes += entry.num_bytes
            if num_bytes >= TICK_BYTES:
                tick()
                num_bytes = 0


class RemoteShard:
    """A shard in an object store: two requests for the header, and as few as possible for the
    data."""

    def __init__(self, filesystem: Any, path: str, name: str, num_bytes: int) -> None:
        self._filesystem, self._path, self.name = filesystem, path, name
        self._num_bytes = num_bytes
        self._header: Header | None = None

    def header(self) -> Header:
        if self._header is None:
            start = self._read(0, 8)
            header = parse_header(self._read(0, header_length(start, self.name)), self.name)
            self._header = _expect_to_fit(header, self._num_bytes, self.name)
        return self._header

    def checksum(self) -> str:
        """xxh3_128 of the whole file, hex."""
        state = xxhash.xxh3_128()
        try:
            with self._filesystem.open(self._path, "rb") as stream:
                while chunk := stream.read(4 * 2**20):
                    state.update(chunk)
        except Exception as error:  # drivers raise what their libraries raise
            raise _cannot_open(self.name, error) from None
        return state.hexdigest()

    def data(self, begin: int, end: int) -> Bytes:
        return np.frombuffer(self._part(begin, end), dtype=np.uint8)

    def entries(
        self, wanted: Iterable[Entry], tick: Callable[[], None]
    ) -> Iterator[tuple[Entry, Bytes]]:
        self.header()  # before other threads ask for it
        return read_entries(wanted, self._part, tick)

    def _part(self, begin: int, end: int) -> bytes:
        at = self.header().data_start
        raw = self._read(at + begin, at + end) if end > begin else b""
        if len(raw) != end - begin:
            raise DamagedCheckpoint(self.name, f"it ends before byte {at + end}")
        return raw

    def _read(self, begin: int, end: int) -> bytes:
        try:
            data: bytes = self._filesystem.cat_file(self._path, start=begin, end=end)
        except Exception as error:  # as in checksum
            raise _cannot_open(self.name, error) from None
        return data


ShardSource = MappedShard | RemoteShard
"""One shard file."""


class CheckpointFiles:
    """The storage tier below one path or URL; only files that a manifest names are read."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.filesystem, self.root = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise UnreadableCheckpoint(f"{path}: cannot be opened: {error}") from None
        self.is_local = is_local(self.filesystem)

    def manifest(self, directory: str) -> Manifest:
        """The manifest in a directory. Raises MissingCheckpoint: none, in a store that has other
        checkpoints; DamagedCheckpoint: broken; UnreadableCheckpoint: the store cannot be read."""
        name = f"{directory}/{MANIFEST_NAME}"
        try:
            data = read_small(self.filesystem, f"{self.root}/{name}", limits.MAX_MANIFEST_BYTES)
        except ValueError as error:
            raise DamagedCheckpoint(name, str(error)) from None
        except ABSENT:
            raise self._no_manifest(directory) from None
        except Exception as error:  # as in RemoteShard
            raise UnreadableCheckpoint(f"{name}: cannot be read: {_why(error)}") from None
        try:
            return decode_manifest(data, directory)
        except ValueError as error:
            raise DamagedCheckpoint(name, str(error)) from None

    def _no_manifest(self, directory: str) -> HoldfastError:
        """A path without any checkpoint is that of a volume that is not mounted, not a store that
        has lost just this one."""
        if not any(parse_directory_name(name) for name in self.directories()):
            what = f"the store has neither {directory} nor any other checkpoint; is it mounted?"
            return UnreadableCheckpoint(f"{self.path}: {what}")
        return MissingCheckpoint(
            f"{self.path}: {directory} is not a committed checkpoint (no {MANIFEST_NAME}); "
            "`holdfast checkpoint list` shows the committed ones"
        )

    def directories(self) -> list[str]:
        """Names of the directories below the path, oldest step first; empty if it does not
        exist."""
        try:
            names = self.filesystem.ls(self.root, detail=False, refresh=True)
        except ABSENT:
            return []
        except Exception as error:  # as in RemoteShard
            raise UnreadableCheckpoint(f"{self.path}: cannot be listed: {_why(error)}") from None
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in names)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A binary file that gets this name below the path when the block ends without an error.
        Raises what the store's library raises."""
        path = f"{self.root}/{name}"
        if self.is_local:
            with replacing(Path(path)) as file:
                yield file
            return
        file = self.filesystem.open(path, "wb")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # close() would complete a partial upload
            file.closed = True  # its destructor would close it
            raise
        file.close()

    def open(self, directory: str, file: ShardFile) -> ShardSource:
        """Open one shard file, without waiting for a FIFO. Raises DamagedCheckpoint if it is not a
        file with data and the manifest's length."""
        name = f"{directory}/{file.file}"
        path = f"{self.root}/{name}"
        if not self.is_local:
            try:
                size = int(self.filesystem.size(path))
            except Exception as error:  # as in RemoteShard
                raise _cannot_open(name, error) from None
            _expect_length(name, size, file)
            return RemoteShard(self.filesystem, path, name, size)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a FIFO
        except OSError as error:
            raise _cannot_open(name, error) from None
        status = os.fstat(fd)
        try:
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpoint(name, "not a regular file")
            _expect_length(name, status.st_size, file)
        except DamagedCheckpoint:
            os.close(fd)
            raise
        return MappedShard(fd, file.num_bytes, name)


def expect_identity(source: ShardSource, step: int, shard: int, num_shards: int) -> Header:
    """The header of this shard of this step. Raises DamagedCheckpoint for another file."""
    header = source.header()
    got = (header.step, header.shard, header.num_shards)
    if got != (step, shard, num_shards):
        what = (
            f"got step {got[0]}, shard {got[1]} of {got[2]}; expected step {step}, shard {shard} "
            f"of {num_shards}"
        )
        raise DamagedCheckpoint(source.name, what)
    return header


def _expect_to_fit(header: Header, num_bytes: int, name: str) -> Header:
    if header.num_bytes > num_bytes:
        what = f"{num_bytes} bytes; its header expects {header.num_bytes}"
        raise DamagedCheckpoint(name, what)
    return header


def _expect_length(name: str, got: int, file: ShardFile) -> None:
    if got != file.num_bytes:
        raise DamagedCheckpoint(name, f"{got} bytes; its manifest says {file.num_bytes}")
    if not got:
        raise DamagedCheckpoint(name, "the file is empty")


def _cannot_open(name: str, error: Exception) -> HoldfastError:
    if isinstance(error, ABSENT):
        return DamagedCheckpoint(name, "the file is missing, though the manifest names it")
    if getattr(error, "errno", None) in NOT_A_FILE:
        return DamagedCheckpoint(name, "not a regular file")
    return UnreadableCheckpoint(f"{name}: cannot be read: {_why(error)}")


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
