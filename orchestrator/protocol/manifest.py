"""The checkpoint manifest and the directory layout of the storage tier. No IO.

    <checkpoint path>/
      step-00000120.gen-3/              one directory per attempt: (step, generation)
        shard-00000-of-00002.safetensors
        shard-00001-of-00002.safetensors
        shard-00001-of-00002.safetensors.note   only if no controller was there
        manifest.json                   written last, atomically, by the controller

A checkpoint exists once its manifest does; readers trust only files that a manifest names. Every
shard file is a safetensors file whose header gives, for each tensor, its part of the global tensor
(workers/checkpoint/layout.py), so a manifest only lists files, their lengths and their checksums.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from .. import limits
from .coverage import MODULUS
from .facts import ShardFile
from .framing import UNDECODABLE
from .mesh import Mesh

MANIFEST_NAME = "manifest.json"
FORMAT = "holdfast.dev/checkpoint/v1"
MAX_NAMED, MAX_NAME_CHARACTERS = 8, 80
"""Bounds of what is quoted of a wrong manifest."""
MAX_NUMBER = 2**63 - 1
"""Steps, generations and bytes: the journal's format has no larger signed number."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint."""

    format: str = FORMAT
    job: str
    step: int
    """The last finished step that this state contains."""
    generation: int
    mesh: Mesh
    """The mesh that wrote the checkpoint; any other mesh can read it."""
    files: tuple[ShardFile, ...]
    committed_at: str
    """RFC 3339, UTC."""
    versions: dict[str, str] = {}
    repaired: dict[str, str] = {}
    """Repairs of a repaired checkpoint: `file: tensor` -> the checkpoint it is from, or zeros."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def directory(self) -> str:
        return directory_name(self.step, self.generation)


NOTE_SUFFIX = ".note"
"""Suffix after the name of a shard file."""


class ShardNote(msgspec.Struct, frozen=True, kw_only=True):
    """Note of an agent beside a shard file, by which a later controller commits the checkpoint."""

    file: ShardFile
    mesh: Mesh


def encode_note(note: ShardNote) -> bytes:
    return msgspec.json.encode(note)


def decode_note(data: bytes) -> ShardNote:
    """Raises ValueError with the reason."""
    try:
        note = msgspec.json.decode(data, type=ShardNote)
    except UNDECODABLE as error:
        raise ValueError(f"not a note: {error}") from None
    _expect_mesh(note.mesh)
    _expect_file(note.file, note.mesh, note.file.step, note.file.generation)
    return note


def directory_name(step: int, generation: int) -> str:
    """Directory of one attempt. A generation writes a step at most once: attempts never mix."""
    return f"step-{step:08d}.gen-{generation}"


def parse_directory_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a checkpoint directory; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,19})\.gen-(\d{1,19})", name)
    at = (int(match[1]), int(match[2])) if match else None
    return at if at and max(at) <= MAX_NUMBER and directory_name(*at) == name else None


def shard_file_name(shard: int, num_shards: int) -> str:
    return f"shard-{shard:05d}-of-{num_shards:05d}.safetensors"


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(data: bytes, directory: str) -> Manifest:
    """The manifest in JSON text that was read from `directory`. ValueError has the reason."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except UNDECODABLE as error:
        raise ValueError(f"not a manifest: {error}") from None
    if manifest.format != FORMAT:
        raise ValueError(f"format: got {manifest.format!r}; expected {FORMAT!r}")
    expect_files(manifest.files, manifest.mesh, manifest.step, manifest.generation)
    if manifest.directory != directory:
        raise ValueError(f"got the manifest of {manifest.directory}; expected {directory}'s")
    return manifest


def expect_files(files: Sequence[ShardFile], mesh: Mesh, step: int, generation: int) -> None:
    """Raise ValueError unless these are all shards of the mesh, each once, of this attempt and with
    the name that is due. Agents report them, and a store may contain anything: names become
    paths, and numbers become records of the journal."""
    _expect_mesh(mesh)
    shards = sorted(file.shard for file in files)
    if len(shards) != mesh.num_shards or shards != list(range(mesh.num_shards)):
        raise ValueError(
            f"files: got {len(files)} with shards {shards[:MAX_NAMED]}; expected "
            f"0 to {mesh.num_shards - 1}, each once"
        )
    for file in files:
        _expect_file(file, mesh, step, generation)
    _expect_number("files: their bytes", sum(file.num_bytes for file in files), MAX_NUMBER)


def _expect_file(file: ShardFile, mesh: Mesh, step: int, generation: int) -> None:
    _expect_number("shard", file.shard, mesh.num_shards - 1)
    due = shard_file_name(file.shard, mesh.num_shards)
    if file.file != due or file.num_shards != mesh.num_shards:
        raise ValueError(f"file: got {file.file[:MAX_NAME_CHARACTERS]!r}; expected {due!r}")
    for name in ("step", "generation", "num_bytes"):
        _expect_number(f"{due}: {name}", getattr(file, name), MAX_NUMBER)
    if (file.step, file.generation) != (step, generation):
        raise ValueError(
            f"{due}: got step {file.step}, generation {file.generation}; expected step {step}, "
            f"generation {generation}"
        )
    for number in (file.coverage.weighted, file.coverage.whole):
        _expect_number(f"{due}: coverage", number, MODULUS - 1)


def _expect_number(name: str, got: int, most: int) -> None:
    if not 0 <= got <= most:
        raise ValueError(f"{name}: got {got}; expected 0 to {most}")


def _expect_mesh(mesh: Mesh) -> None:
    most = limits.MAX_NODES * limits.MAX_GPUS
    if min(mesh.sizes) < 1 or max(mesh.sizes) > most or mesh.world_size > most:
        raise ValueError(f"mesh: got {mesh.describe()}; expected 1 to {most} ranks")
