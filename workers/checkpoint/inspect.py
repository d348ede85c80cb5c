"""Committed checkpoints below a path: list, verify, export to plain safetensors. No torch."""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.coverage import BoxKey, uncovered
from holdfast.orchestrator.protocol.facts import steps_done
from holdfast.orchestrator.protocol.manifest import Manifest, parse_directory_name

from .layout import (
    DTYPE_BYTES,
    INTEGER_DTYPES,
    MODEL,
    MODULES,
    RANK,
    Box,
    Bytes,
    DamagedCheckpoint,
    Entry,
    hash_bytes,
)
from .shard_sources import CheckpointFiles, ShardSource, expect_identity


@dataclass
class VerifyResult:
    """The result of verifying one checkpoint."""

    directory: str
    num_files: int = 0
    num_tensors: int = 0
    num_rank_states: int = 0
    """Ranks with state of their own (`per_rank`)."""
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def find(path: str, step: int | None = None) -> Manifest:
    """The newest committed checkpoint, or a step's. Raises UserError if there is none."""
    store, committed = CheckpointFiles(path), []
    for name in filter(parse_directory_name, store.directories()):
        # Without a manifest, or with one that is damaged, a directory is not a checkpoint.
        with contextlib.suppress(HoldfastError):
            committed.append(store.manifest(name))
    committed.sort(key=lambda m: (m.step, m.generation), reverse=True)
    return choose(path, committed, step, "committed checkpoint")


def choose(path: str, manifests: Sequence[Manifest], step: int | None, kind: str) -> Manifest:
    """The first manifest, or a step's. Raises UserError if there is none."""
    for manifest in manifests:
        if step is None or manifest.step == step:
            return manifest
    have = ", ".join(str(m.step + 1) for m in manifests) or "none"
    wanted = "" if step is None else f" after {steps_done(step)}"
    raise UserError(f"{path}: got no {kind}{wanted}; expected one (steps: {have})")


def verify(path: str, manifest: Manifest) -> VerifyResult:
    """Reads every byte; checks lengths, checksums of files and tensors, and that the shards
    together have every value of every tensor."""
    store = CheckpointFiles(path)
    result = VerifyResult(manifest.directory, num_files=len(manifest.files))
    boxes: dict[tuple[str, tuple[int, ...]], list[BoxKey]] = {}
    for file in manifest.files:
        try:
            source = store.open(manifest.directory, file)
            header = expect_identity(source, file.step, file.shard, file.num_shards)
            checksum = source.checksum()
            entries = header.entries.values()
            read = source.entries(entries, lambda: None)
            damaged = [entry.name for entry, data in read if not _intact(entry, data)]
        except HoldfastError as error:
            result.problems.append(str(error))
            continue
        for name in damaged:
            what = "its bytes do not match its checksum"
            result.problems.append(str(DamagedCheckpoint(source.name, what, name)))
        if checksum != file.checksum and not damaged:
            what = f"checksum {checksum}; its manifest says {file.checksum}"
            result.problems.append(str(DamagedCheckpoint(source.name, what)))
        result.num_bytes += file.num_bytes
        for entry in entries:
            held = boxes.setdefault((entry.name, entry.box.global_shape), [])
            held.append((entry.box.offset, entry.box.shape))
    names = {name for name, _shape in boxes}
    result.num_rank_states = sum(name.startswith(RANK) for name in names)
    result.num_tensors = len(names) - result.num_rank_states
    if result.ok:
        gaps = ((name, _gap(shape, held)) for (name, shape), held in boxes.items())
        result.problems += [f"{manifest.directory}: {name}: {gap}" for name, gap in gaps if gap]
    return result


def _intact(entry: Entry, data: Bytes) -> bool:
    return f"{hash_bytes(data):016x}" == entry.checksum


def _gap(shape: tuple[int, ...], boxes: Iterable[BoxKey]) -> str:
    """Part of a tensor that the boxes lack; empty: none."""
    try:
        missing = uncovered(shape, boxes)
    except ValueError as error:
        return str(error)
    want = math.prod(shape)
    return f"{want - missing} of {want} values in all shards" if missing else ""


# -- export -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _WholeTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[ShardSource, Entry], ...]
    data: bytes = b""
    """Bytes of the value, if no entry has them."""

    @property
    def num_bytes(self) -> int:
        return Box(self.shape, (), self.shape).num_elements * DTYPE_BYTES[self.dtype]


def export(
    path: str,
    manifest: Manifest,
    target: Path,
    *,
    optimizer: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Writes whole tensors as plain safetensors: `model.safetensors`, or several files and an
    index.

    The model under its own names, with what modules returned from get_extra_state: a tensor under
    the name that state_dict gives it, another value in the metadata. With `optimizer` its state
    too, as `optim.*`. State of single ranks (`per_rank`) stays behind. One tensor is in memory at a
    time. Checks every byte; raises DamagedCheckpoint, and UserError for a name that two have.
    """
    store = CheckpointFiles(path)
    sources = [store.open(manifest.directory, file) for file in manifest.files]
    of_modules: dict[str, Any] = {}
    for source in reversed(sources):  # of ranks with one module, the first one's
        of_modules |= source.header().extra.get(MODULES, {})
    tensors = _collect(sources, of_modules, optimizer)
    files = _split(tensors, max_file_bytes)
    values = {name: held for name, held in of_modules.items() if _tensor_of(name, held) is None}
    about = {"format": "pt", "job": manifest.job, "step": str(manifest.step)}
    about |= {MODULES: json.dumps(values)} if values else {}
    target.mkdir(parents=True, exist_ok=True)
    names = _file_names(len(files))
    for name, content in zip(names, files, strict=True):
        _write_file(target / name, content, about)
    if len(files) > 1:
        _write_index(target, names, files)
    return [target / name for name in names]


def _tensor_of(name: str, held: Any) -> _WholeTensor | None:
    """State of a module (module_state.py) that is a tensor."""
    match held:
        case [{"__blob__": ["tensor", dtype, shape, _, _]}, data]:
            try:
                tensor = _WholeTensor(name, dtype, tuple(shape), (), base64.b64decode(data))
                if tensor.num_bytes == len(tensor.data):
                    return tensor
            except (KeyError, TypeError, ValueError):
                pass
            raise DamagedCheckpoint("the checkpoint", "its value cannot be read", name)
    return None


def _collect(
    sources: Sequence[ShardSource], of_modules: Mapping[str, Any], optimizer: bool
) -> list[_WholeTensor]:
    parts_of: dict[str, list[tuple[ShardSource, Entry]]] = {}
    for source in sources:
        for name, entry in source.header().entries.items():
            if name.startswith(MODEL) or (optimizer and not name.startswith(RANK)):
                parts_of.setdefault(name, []).append((source, entry))
    module_tensors = (_tensor_of(name, held) for name, held in of_modules.items())
    tensors = [tensor for tensor in module_tensors if tensor is not None]
    for name, parts in sorted(parts_of.items()):
        entry = parts[0][1]
        short = name.removeprefix(MODEL)
        tensors.append(_WholeTensor(short, entry.dtype, entry.box.global_shape, tuple(parts)))
    if twice := [name for name, num in Counter(w.name for w in tensors).items() if num > 1]:
        raise UserError(
            f"checkpoint export: got {twice[0]} in the model and in the optimizer's state; "
            "expected different names; leave out --optimizer"
        )
    # safetensors allows no gaps; with the widest elements first each tensor is aligned.
    return sorted(tensors, key=lambda t: -DTYPE_BYTES[t.dtype])


def _split(tensors: list[_WholeTensor], max_file_bytes: int) -> list[list[_WholeTensor]]:
    files: list[list[_WholeTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    return files


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_file(path: Path, tensors: list[_WholeTensor], about: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": about}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.num_bytes]
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets,
        }  # fmt: skip
        at = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                _write_tensor(stream, tensor)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_tensor(stream: BinaryIO, tensor: _WholeTensor) -> None:
    if not tensor.parts:
        stream.write(tensor.data)
        return
    integers = INTEGER_DTYPES[DTYPE_BYTES[tensor.dtype]]
    parts: dict[BoxKey, tuple[ShardSource, Entry]] = {}
    for source, entry in tensor.parts:
        if entry.dtype != tensor.dtype or entry.box.global_shape != tensor.shape:
            raise DamagedCheckpoint(source.name, "shards disagree about it", tensor.name)
        parts.setdefault((entry.box.offset, entry.box.shape), (source, entry))
    if gap := _gap(tensor.shape, parts):  # before memory is taken for what no shard has
        raise DamagedCheckpoint("the checkpoint", gap, tensor.name)
    whole = np.empty(tensor.shape, integers)
    for place, (source, entry) in parts.items():
        data = source.data(entry.begin, entry.end)
        if f"{hash_bytes(data):016x}" != entry.checksum:
            what = "its bytes do not match its checksum"
            raise DamagedCheckpoint(source.name, what, tensor.name)
        at = tuple(slice(o, o + n) for o, n in zip(*place, strict=True))
        whole[at] = data.view(integers).reshape(entry.box.shape)
    stream.write(whole.reshape(-1).view(np.uint8).data)


def _write_index(target: Path, names: list[str], files: list[list[_WholeTensor]]) -> None:
    """Writes the index that Hugging Face loaders read for weights in several files."""
    where = {t.name: name for name, content in zip(names, files, strict=True) for t in content}
    total = sum(t.num_bytes for content in files for t in content)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
