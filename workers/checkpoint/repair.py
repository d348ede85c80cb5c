"""Repair: a new checkpoint from the intact parts of a damaged one. No torch.

A damaged part of a tensor is taken from the newest older checkpoint that has the same part intact.
If there is none, the optimizer's state of that parameter begins at zero. Values of the model are
never made up: without an intact copy the checkpoint cannot be repaired.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import xxhash

from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.protocol.files import make_directory, write_all
from holdfast.orchestrator.protocol.manifest import (
    MANIFEST_NAME,
    Manifest,
    directory_name,
    encode_manifest,
    expect_files,
    parse_directory_name,
)
from holdfast.orchestrator.protocol.mesh import Mesh

from . import inspect
from .layout import OPTIMIZER, Bytes, Entry, encode_extra, hash_bytes, make_layout
from .shard_sources import (
    ABSENT,
    CheckpointFiles,
    ShardSource,
    UnreadableCheckpoint,
    expect_identity,
)

ZEROS = "zeros"
HEADER = "header"
"""Named in place of a tensor: names, shapes, and the values that are not tensors."""
_FILE_NAME = re.compile(r"shard-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class Replaced:
    """A part that the repaired checkpoint does not have from the damaged one."""

    file: str
    tensor: str
    source: str
    """Directory of the checkpoint that it is from, or ZEROS."""


@dataclass
class RepairResult:
    directory: str
    """The damaged checkpoint."""
    step: int
    written: str = ""
    """Directory of the repaired one; empty: nothing was written."""
    num_bytes: int = 0
    replaced: list[Replaced] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Reasons why the checkpoint cannot be repaired."""


@dataclass(frozen=True)
class _RepairedPart:
    """One entry of the repaired file, and where its bytes are. No source: zeros."""

    entry: Entry
    source: ShardSource | None

    def data(self) -> Bytes:
        if self.source is None:
            return np.zeros(self.entry.num_bytes, dtype=np.uint8)
        return self.source.data(self.entry.begin, self.entry.end)


def repair(path: str, step: int | None = None, *, write: bool, job: str = "") -> RepairResult:
    """Repair the newest checkpoint, or a step's. Without `write` nothing is changed. `job`:
    the name for the new manifest if no manifest is left that has one. Raises UserError if there is
    nothing to repair, HoldfastError if the store cannot be read or written."""
    store = CheckpointFiles(path)
    saved = _checkpoints(store)
    chosen = inspect.choose(path, saved, step, "checkpoint with all its files")
    if chosen.committed_at and inspect.verify(path, chosen).ok:
        raise UserError(f"{path}: {chosen.directory} is intact; expected a damaged checkpoint")
    work = _Repair(store, chosen, [c for c in saved if _key(c) < _key(chosen)])
    result = work.plan()
    if write and not result.problems:
        jobs = [c.job for c in saved if c.job] or [job]
        if not jobs[0]:
            got = f"nothing, and no manifest in {path} is left that has it"
            raise UserError.of("--job", got, "the job's name")
        present = filter(None, map(parse_directory_name, store.directories()))
        work.write(path, 1 + max(generation for _step, generation in present), jobs[0])
    return result


def _key(manifest: Manifest) -> tuple[int, int]:
    return (manifest.step, manifest.generation)


def _checkpoints(store: CheckpointFiles) -> list[Manifest]:
    """Newest first; also those whose manifest is gone or damaged but whose files are all there."""
    checkpoints = []
    for name in filter(parse_directory_name, store.directories()):
        try:
            checkpoints.append(store.manifest(name))
        except UnreadableCheckpoint:
            raise
        except HoldfastError:
            checkpoints += _without_manifest(store, name)
    return sorted(checkpoints, key=_key, reverse=True)


def _without_manifest(store: CheckpointFiles, name: str) -> list[Manifest]:
    """Manifests by the names of the files; none if one is missing."""
    at = parse_directory_name(name)
    assert at is not None
    try:
        listed: list[dict[str, Any]] = store.filesystem.ls(f"{store.root}/{name}", detail=True)
    except ABSENT:
        return []
    files = []
    for info in listed:
        match = _FILE_NAME.fullmatch(str(info["name"]).rpartition("/")[2])
        if match:
            shard, count = int(match[1]), int(match[2])
            files.append(ShardFile(*at, shard, count, match[0], int(info["size"]), ""))
    files.sort(key=lambda file: file.shard)
    mesh = Mesh(shard=len(files))
    try:
        expect_files(files, mesh, *at)
    except ValueError:
        return []
    return [
        Manifest(
            job="", step=at[0], generation=at[1], mesh=mesh, files=tuple(files), committed_at=""
        )
    ]


class _Repair:
    def __init__(self, store: CheckpointFiles, chosen: Manifest, older: list[Manifest]) -> None:
        self._store, self._chosen = store, chosen
        self._donors = [m for m in older if m.mesh.num_shards == chosen.mesh.num_shards]
        self._sources: dict[tuple[str, int], ShardSource | None] = {}
        self._parts: dict[int, list[_RepairedPart]] = {}
        self._extra: dict[str, Any] = {}
        self._fresh: dict[str, None] = {}
        """Parameters whose optimizer state begins at zero."""
        self.result = RepairResult(chosen.directory, chosen.step)

    # -- plan -----------------------------------------------------------------------------------
    def plan(self) -> RepairResult:
        for file in self._chosen.files:
            self._plan_file(file)
        for shard, parts in self._parts.items():
            self._parts[shard] = [self._zeroed(part, shard) for part in parts]
        return self.result

    def _plan_file(self, file: ShardFile) -> None:
        base, origin = self._base(file)
        if base is None:
            self.result.problems.append(
                f"{file.file}: damaged or missing, and no older checkpoint has this file intact"
            )
            return
        if not self._extra or origin == self._chosen.directory:
            self._extra = base.header().extra
        if origin != self._chosen.directory:
            self.result.replaced.append(Replaced(file.file, HEADER, origin))
        self._parts[file.shard] = [
            self._part(base, origin, entry, file) for entry in base.header().entries.values()
        ]

    def _base(self, file: ShardFile) -> tuple[ShardSource | None, str]:
        """The newest file of this shard whose header is intact."""
        for manifest in (self._chosen, *self._donors):
            source = self._source(manifest, file.shard)
            if source is not None:
                return source, manifest.directory
        return None, ""

    def _part(self, base: ShardSource, origin: str, entry: Entry, file: ShardFile) -> _RepairedPart:
        if _intact(base, entry):
            if origin != self._chosen.directory:
                self.result.replaced.append(Replaced(file.file, entry.name, origin))
            return _RepairedPart(entry, base)
        for donor in self._donors:
            source = self._source(donor, file.shard)
            other = source.header().entries.get(entry.name) if source is not None else None
            if source is None or other is None or source is base:
                continue
            same = (other.box, other.dtype) == (entry.box, entry.dtype)
            if same and _intact(source, other):
                self.result.replaced.append(Replaced(file.file, entry.name, donor.directory))
                return _RepairedPart(other, source)
        if entry.name.startswith(OPTIMIZER):
            self._fresh[_parameter(entry.name)] = None
        else:
            self.result.problems.append(
                f"{file.file}: {entry.name} is damaged, and no older checkpoint has it intact"
            )
        return _RepairedPart(entry, None)

    def _zeroed(self, part: _RepairedPart, shard: int) -> _RepairedPart:
        """All state of such a parameter, in all shards: a moment without its counterpart would make
        a wrong first step."""
        name = part.entry.name
        if not name.startswith(OPTIMIZER) or _parameter(name) not in self._fresh:
            return part
        file = self._chosen.files[shard].file
        self.result.replaced = [
            r for r in self.result.replaced if (r.file, r.tensor) != (file, name)
        ]
        self.result.replaced.append(Replaced(file, name, ZEROS))
        return _RepairedPart(part.entry, None)

    def _source(self, manifest: Manifest, shard: int) -> ShardSource | None:
        """None: its header cannot be used. Raises UnreadableCheckpoint."""
        at = (manifest.directory, shard)
        if at not in self._sources:
            self._sources[at] = None
            file = next(entry for entry in manifest.files if entry.shard == shard)
            try:
                source = self._store.open(manifest.directory, file)
                expect_identity(source, file.step, shard, file.num_shards)
            except UnreadableCheckpoint:
                raise
            except HoldfastError:
                return None
            self._sources[at] = source
        return self._sources[at]

    # -- write ----------------------------------------------------------------------------------
    def write(self, path: str, generation: int, job: str) -> None:
        """The manifest comes last, after all files have been read again."""
        chosen, name = self._chosen, directory_name(self._chosen.step, generation)
        system, directory = self._store.filesystem, f"{self._store.root}/{name}"
        make_directory(system, directory)
        files = tuple(self._write_file(name, file, generation) for file in chosen.files)
        manifest = msgspec.structs.replace(
            chosen,
            job=job,
            generation=generation,
            files=files,
            committed_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            repaired={f"{r.file}: {r.tensor}": r.source for r in self.result.replaced},
        )
        check = inspect.verify(path, manifest)
        if not check.ok:
            self.result.problems += check.problems
            with contextlib.suppress(Exception):
                system.rm(directory, recursive=True)
            return
        with self._store.writing(f"{name}/{MANIFEST_NAME}") as file:
            write_all(file, encode_manifest(manifest))
        self.result.written, self.result.num_bytes = manifest.directory, manifest.num_bytes

    def _write_file(self, directory: str, file: ShardFile, generation: int) -> ShardFile:
        parts = {part.entry.name: part for part in self._parts[file.shard]}
        layout = make_layout(
            [part.entry for part in parts.values()],
            generation=generation,
            shard=file.shard,
            num_shards=file.num_shards,
            extra=encode_extra(self._extra),
        )
        checksums = [hash_bytes(parts[entry.name].data()) for entry in layout.entries]
        header = bytes(layout.render(self._chosen.step, checksums, encode_extra(self._extra)))
        digest = xxhash.xxh3_128()
        with self._store.writing(f"{directory}/{file.file}") as stream:
            tensors = (parts[entry.name].data().tobytes() for entry in layout.entries)
            for data in chain((header,), tensors):
                digest.update(data)
                write_all(stream, data)
        return ShardFile(
            file.step,
            generation,
            file.shard,
            file.num_shards,
            file.file,
            layout.num_bytes,
            digest.hexdigest(),
        )


def _intact(source: ShardSource, entry: Entry) -> bool:
    try:
        return f"{hash_bytes(source.data(entry.begin, entry.end)):016x}" == entry.checksum
    except UnreadableCheckpoint:
        raise
    except HoldfastError:
        return False


def _parameter(name: str) -> str:
    """Parameter of an entry of the optimizer."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]
