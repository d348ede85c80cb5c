"""Commits of checkpoints that hold every value of every tensor, and of no others."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.protocol.coverage import proved, uncovered
from holdfast.orchestrator.protocol.facts import CoverageSum, ShardFile
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store import store as store_module
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore, NotCovered
from holdfast.workers.agent.storage.memfd import Memfd
from holdfast.workers.agent.storage.persist import write_shard
from holdfast.workers.checkpoint.coverage import coverage_sum
from holdfast.workers.checkpoint.layout import (
    Box,
    Entry,
    Header,
    encode_extra,
    hash_bytes,
    make_layout,
    parse_header,
)
from tests.unit.workers.checkpoint.fake_ranks import staged

STEP, GENERATION = 9, 1


def _rows(begin: int, rows: int, of: int, parts: int) -> Box:
    return Box((of, 3), (begin, 0), (rows, 3), parts)


def _shard(shard: int, num_shards: int, boxes: dict[str, Box]) -> bytes:
    import numpy as np

    entries = [Entry(name, "F32", box) for name, box in boxes.items()]
    layout = make_layout(
        entries, generation=GENERATION, shard=shard, num_shards=num_shards, extra=encode_extra({})
    )
    data = [np.zeros(entry.num_bytes, np.uint8) for entry in layout.entries]
    header = bytes(layout.render(STEP, [hash_bytes(one) for one in data], encode_extra({})))
    return header + b"".join(one.tobytes() for one in data)


def _persist(path: Path, shard: int, num_shards: int, content: bytes) -> ShardFile:
    """Write and report it like an agent."""
    memory = Memfd("test", len(content))
    os.write(memory.fd, content)
    name = shard_file_name(shard, num_shards)
    directory = directory_name(STEP, GENERATION)
    done = write_shard(memory, len(content), str(path), directory, name)
    return ShardFile(
        STEP, GENERATION, shard, num_shards, name, len(content), done.checksum, done.coverage
    )


def _sums(files: dict[int, bytes]) -> list[ShardFile]:
    return [
        ShardFile(
            STEP, GENERATION, shard, len(files), "", 0, "", coverage_sum(parse_header(file, "f"))
        )
        for shard, file in files.items()
    ]


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 3), (2, 2), (1, 4)])
def test_the_sums_of_a_sharded_model_prove_that_it_is_whole(replicate: int, shard: int) -> None:
    files = _sums(staged(replicate, shard))
    assert proved(files, Mesh(replicate=replicate, shard=shard))
    if shard > 1:
        files[0] = files[1]
        assert not proved(files, Mesh(replicate=replicate, shard=shard))


def test_a_model_over_more_ranks_than_the_mesh_is_not_committed_and_named(tmp_path: Path) -> None:
    """Plain fully_shard(model) on 2 nodes x 2 workers, for which the mesh is replicate 2 x shard 2:
    only the first two of four parts are persisted."""
    store = CheckpointStore(str(tmp_path), "tiny")
    files = tuple(
        _persist(tmp_path, at, 2, _shard(at, 2, {"model.a": _rows(2 * at, 2, 8, 4)}))
        for at in range(2)
    )
    with pytest.raises(NotCovered, match=r"model.a lacks 12 values.*spec.parallelism.shard to 4"):
        store.commit(STEP, Mesh(replicate=2, shard=2), files)
    assert store.manifests() == []


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param([_rows(0, 8, 8, 1), _rows(0, 8, 8, 1)], id="every-rank-has-the-whole"),
        pytest.param([_rows(0, 7, 8, 2), _rows(7, 1, 8, 2)], id="uneven"),
        pytest.param([_rows(0, 8, 8, 2), _rows(0, 0, 8, 2)], id="an-empty-part"),
        pytest.param([_rows(0, 6, 8, 2), _rows(4, 4, 8, 2)], id="overlapping"),
    ],
)
def test_all_values_are_enough_however_they_are_split(tmp_path: Path, boxes: list[Box]) -> None:
    store = CheckpointStore(str(tmp_path), "tiny")
    files = tuple(
        _persist(tmp_path, at, 2, _shard(at, 2, {"model.a": box})) for at, box in enumerate(boxes)
    )
    assert store.commit(STEP, Mesh(shard=2), files)


def test_tensors_that_only_one_rank_has_are_covered(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), "tiny")
    files = tuple(
        _persist(tmp_path, at, 2, _shard(at, 2, {f"model.{at}": _rows(0, 4, 4, 1)}))
        for at in range(2)
    )
    assert store.commit(STEP, Mesh(shard=2), files)


def test_headers_are_read_once_for_a_layout_and_never_if_the_sums_prove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = store_module.read_boxes

    def counted(system: object, path: str) -> object:
        reads.append(path)
        return read(system, path)

    monkeypatch.setattr(store_module, "read_boxes", counted)
    store = CheckpointStore(str(tmp_path), "tiny")
    whole = {"model.a": _rows(0, 8, 8, 2)}
    split = [{"model.a": _rows(4 * at, 4, 8, 2)} for at in range(2)]
    proof = tuple(_persist(tmp_path, at, 2, _shard(at, 2, split[at])) for at in range(2))
    store.commit(STEP, Mesh(shard=2), proof)
    assert reads == []
    uneven = tuple(_persist(tmp_path, at, 2, _shard(at, 2, whole)) for at in range(2))
    for _ in range(3):
        store.commit(STEP, Mesh(shard=2), uneven)
    assert len(reads) == 2


def test_4096_ranks_report_a_few_bytes_each_however_many_tensors_they_have() -> None:
    ranks = 4096
    files = []
    for at in range(ranks):
        entries = {
            name: Entry(name, "F32", _rows(2 * at, 2, 2 * ranks, ranks))
            for name in ("model.a", "optim.a.exp_avg", "optim.a.exp_avg_sq")
        }
        held = coverage_sum(Header(STEP, GENERATION, at, ranks, entries, {}, 0))
        files.append(ShardFile(STEP, GENERATION, at, ranks, "s", 0, "c", held))
    assert proved(files, Mesh(shard=ranks))
    plain = msgspec.structs.replace(files[7], coverage=CoverageSum())
    more = len(msgspec.msgpack.encode(files[7])) - len(msgspec.msgpack.encode(plain))
    assert more <= 40
    files[7] = files[8]
    assert not proved(files, Mesh(shard=ranks))


@pytest.mark.parametrize(
    ("boxes", "missing"),
    [
        ([((0, 0), (4, 4))], 0),
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], 0),
        ([((0, 0), (3, 4)), ((1, 0), (3, 4))], 0),
        ([((0, 0), (2, 2)), ((2, 2), (2, 2))], 8),
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], 8),
        ([((0, 0), (0, 4))], 16),
        ([], 16),
    ],
)
def test_values_that_no_box_holds_are_counted(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], missing: int
) -> None:
    assert uncovered((4, 4), boxes) == missing


def test_a_scalar_is_covered_by_any_copy() -> None:
    assert uncovered((), [((), ())]) == 0
    assert uncovered((), []) == 1
