"""Decoders of bytes that others write let nothing out but the error that they name.

A seeded mutator changes valid bytes: `HOLDFAST_FUZZ_CASES=20000 pytest ...` for more than the
default.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from holdfast.orchestrator.protocol import code_archive, manifest
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import CoverageSum, ShardFile
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store import shard_headers
from holdfast.workers.checkpoint import layout

NUM_CASES = int(os.environ.get("HOLDFAST_FUZZ_CASES", "300"))
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, float("nan"), "", "x", "\ud800",
    "../../etc/passwd", [], [[]], {}, {"a": 1}, [-1, 2**63], "9" * 5000,
)  # fmt: skip

FILES = tuple(
    ShardFile(3, 1, shard, 2, manifest.shard_file_name(shard, 2), 100, "c" * 32, CoverageSum(1, 2))
    for shard in range(2)
)
MANIFEST = manifest.Manifest(
    job="j", step=3, generation=1, mesh=Mesh(shard=2), files=FILES, committed_at="2026-11-28"
)
PACKED = {
    "a": {"__float__": "inf"},
    "b": {"__tuple__": [1, "x"]},
    "c": {"__pairs__": [[1, 2], [{"__tuple__": [1]}, 3]]},
    "d": {"__counter__": [["a", 2]]},
}


def shard_bytes() -> bytes:
    entries = [
        layout.Entry("model.a", "F32", layout.Box((8, 4), (4, 0), (4, 4))),
        layout.Entry("model.b", "F16", layout.Box((6,), (0,), (3,))),
    ]
    extra = layout.encode_extra(PACKED)
    made = layout.make_layout(entries, generation=1, shard=0, num_shards=2, extra=extra)
    return bytes(made.render(3, [1, 2], extra))


def places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all values of a JSON document."""
    found = [at] if at else []
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items if isinstance(document, dict | list) else ():
        found += places(value, (*at, key)) if isinstance(value, dict | list) else [(*at, key)]
    return found


def with_odd_value(document: Any, chance: random.Random) -> Any:
    """A copy in which one value is another one, or is missing."""
    made = copy.deepcopy(document)
    *way, last = chance.choice(places(made))
    holder = made
    for key in way:
        holder = holder[key]
    if chance.random() < 0.15:
        del holder[last]
    else:
        holder[last] = chance.choice(ODD_VALUES)
    return made


def with_odd_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes changed, cut off or repeated."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(4):
            case 0:
                made[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del made[at : at + chance.choice((1, 4, 1000))]
            case 2:
                made[at:at] = chance.choice((b"[" * 3000, b"\xff\xff\xff\xff", b'"', b"9" * 30))
            case 3:
                made[at:at] = made[at : at + 50]
    return bytes(made)


def mutated_json(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return with_odd_bytes(data, chance)
    return json.dumps(with_odd_value(json.loads(data), chance)).encode()


def mutated_shard(data: bytes, chance: random.Random) -> bytes:
    """Shard without its header's checksum, of an older version: nothing else detects it."""
    if chance.random() < 0.3:
        return with_odd_bytes(data, chance)
    document = json.loads(data[8:])
    inner = json.loads(document["__metadata__"].pop("holdfast"))
    if chance.random() < 0.5:
        inner = with_odd_value(inner, chance)
    else:
        document = with_odd_value(document, chance)
    if isinstance(document.get("__metadata__"), dict):
        document["__metadata__"].pop("holdfast-header", None)
        document["__metadata__"]["holdfast"] = json.dumps(inner)
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text


def read_boxes(data: bytes, directory: Path) -> None:
    file = directory / "shard"
    file.write_bytes(data)
    boxes = shard_headers.read_boxes(LocalFileSystem(), str(file))
    shard_headers.gaps([boxes, boxes], Mesh(shard=2))


def parse_header(data: bytes, _directory: Path) -> None:
    layout.unpack(layout.parse_header(data, "f").extra)


def unpack_archive(data: bytes, directory: Path) -> None:
    target = Path(directory, str(len(list(directory.iterdir()))))
    target.mkdir()
    code_archive.unpack(code_archive.name_of(data), gzip.compress(data, 1), target)
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target) or path.resolve() == path
        assert path.is_symlink() or path.stat().st_size <= len(data)


def archive() -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name, target in (("sub/x", "../train.py"), ("here", "."), ("up", "sub/../sub")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        file = tarfile.TarInfo("train.py")
        file.size = 5
        tar.addfile(file, io.BytesIO(b"print"))
    return held.getvalue()


def mutated_archive(data: bytes, chance: random.Random) -> bytes:
    """An archive whose header sums fit, so that its members are read."""
    made = bytearray(with_odd_bytes(data, chance)[: len(data)].ljust(len(data), b"\0"))
    for at in range(0, 4 * 512, 512):
        made[at + 148 : at + 156] = b" " * 8
        made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


Decode = Callable[[bytes, Path], object]
Mutate = Callable[[bytes, random.Random], bytes]
DECODERS: dict[str, tuple[bytes, Mutate, Decode, type[Exception]]] = {
    "manifest": (
        manifest.encode_manifest(MANIFEST),
        mutated_json,
        lambda data, _: manifest.decode_manifest(data, MANIFEST.directory),
        ValueError,
    ),
    "note": (
        manifest.encode_note(manifest.ShardNote(file=FILES[0], mesh=Mesh(shard=2))),
        mutated_json,
        lambda data, _: manifest.decode_note(data),
        ValueError,
    ),
    "message": (
        wire.encode(wire.ShardPersisted(generation=1, shard=FILES[0], seconds=1.0))[4:],
        with_odd_bytes,
        lambda data, _: wire.decode(data),
        wire.BadFrame,
    ),
    "boxes": (shard_bytes(), mutated_shard, read_boxes, shard_headers.BadHeader),
    "header": (shard_bytes(), mutated_shard, parse_header, layout.DamagedCheckpoint),
    "values": (
        json.dumps(PACKED).encode(),
        mutated_json,
        lambda data, _: _unpacked(data),
        layout.DamagedCheckpoint,
    ),
    "archive": (archive(), mutated_archive, unpack_archive, code_archive.BadArchive),
}


def _unpacked(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    layout.unpack(value)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_raises_only_the_error_that_it_names(name: str, tmp_path: Path) -> None:
    valid, mutate, decode, named = DECODERS[name]
    decode(valid, tmp_path)
    num_rejected = 0
    for seed in range(NUM_CASES):
        data = mutate(valid, random.Random(seed))
        try:
            decode(data, tmp_path)
        except named:
            num_rejected += 1
        except OSError:  # names that the file system does not take
            assert name == "archive", seed
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r} for {data[:2000]!r}") from error
    assert num_rejected > NUM_CASES // 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "KiB"
