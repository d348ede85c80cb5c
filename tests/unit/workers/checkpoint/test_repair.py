"""Repair of damaged checkpoints from their intact parts and from older checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.manifest import Manifest, shard_file_name
from holdfast.workers.checkpoint import inspect
from holdfast.workers.checkpoint.layout import Box, Entry, encode_extra, hash_bytes, make_layout
from holdfast.workers.checkpoint.repair import HEADER, ZEROS, Replaced, repair
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles

from .test_files import flip_bit, write

WEIGHT, STEP = "model.a", "optim.a.step"
MOMENTS = ("optim.a.exp_avg", "optim.a.exp_avg_sq")


def _shard(step: int, shard: int, generation: int = 1) -> bytes:
    """One of two shards; all values tell the step and the shard."""
    import numpy as np

    box = Box((4,), (2 * shard,), (2,))
    entries = [Entry(name, "F32", box) for name in (WEIGHT, *MOMENTS)]
    entries.append(Entry(STEP, "F32", Box((), (), ())))
    extra = encode_extra({"step": step})
    layout = make_layout(entries, generation=generation, shard=shard, num_shards=2, extra=extra)
    data = {
        entry.name: np.full(entry.box.num_elements, 10 * step + shard + index / 10, np.float32)
        for index, entry in enumerate(layout.entries)
    }
    raw = [data[entry.name].view(np.uint8) for entry in layout.entries]
    header = bytes(layout.render(step, [hash_bytes(one) for one in raw], extra))
    return header + b"".join(one.tobytes() for one in raw)


def checkpoint(path: Path, step: int) -> Manifest:
    return write(path, {shard: _shard(step, shard) for shard in range(2)}, step=step)


def damage(path: Path, manifest: Manifest, shard: int, *tensors: str) -> None:
    file = path / manifest.directory / shard_file_name(shard, 2)
    source = CheckpointFiles(str(path)).open(manifest.directory, manifest.files[shard])
    header = source.header()
    for name in tensors:
        flip_bit(file, header.data_start + header.entries[name].begin)


def _values(path: Path, manifest: Manifest, shard: int, name: str) -> list[float]:
    source = CheckpointFiles(str(path)).open(manifest.directory, manifest.files[shard])
    entry = source.header().entries[name]
    return source.data(entry.begin, entry.end).view("float32").tolist()


def test_damaged_parts_come_from_the_newest_older_checkpoint(tmp_path: Path) -> None:
    for step in (9, 19):
        checkpoint(tmp_path, step)
    newest = checkpoint(tmp_path, 24)
    damage(tmp_path, newest, 1, WEIGHT)
    result = repair(str(tmp_path), write=True)
    file = shard_file_name(1, 2)
    assert result.replaced == [Replaced(file, WEIGHT, "step-00000019.gen-1")]
    assert result.written == "step-00000024.gen-2"
    found = inspect.find(str(tmp_path))
    assert found.directory == result.written and inspect.verify(str(tmp_path), found).ok
    assert found.repaired == {f"{file}: {WEIGHT}": "step-00000019.gen-1"}
    assert _values(tmp_path, found, 0, WEIGHT) == _values(tmp_path, newest, 0, WEIGHT)
    assert int(_values(tmp_path, found, 1, WEIGHT)[0]) == 191, "step 19, shard 1"
    assert not inspect.verify(str(tmp_path), newest).ok, "the damaged one stays as it is"


def test_without_an_intact_copy_the_optimizers_state_of_the_parameter_is_zero(
    tmp_path: Path,
) -> None:
    only = checkpoint(tmp_path, 24)
    damage(tmp_path, only, 1, MOMENTS[1])
    result = repair(str(tmp_path), write=True)
    assert {one.source for one in result.replaced} == {ZEROS}
    found = inspect.find(str(tmp_path))
    for shard in range(2):
        for name in (*MOMENTS, STEP):
            assert set(_values(tmp_path, found, shard, name)) == {0.0}, "all or nothing"
        assert _values(tmp_path, found, shard, WEIGHT) == _values(tmp_path, only, shard, WEIGHT)


def test_values_of_the_model_are_never_made_up(tmp_path: Path) -> None:
    only = checkpoint(tmp_path, 24)
    damage(tmp_path, only, 0, WEIGHT)
    result = repair(str(tmp_path), write=True)
    assert not result.written and WEIGHT in result.problems[0]
    assert [one.name for one in tmp_path.iterdir()] == [only.directory]


@pytest.mark.parametrize("damage", ["header", "missing", "short"])
def test_a_file_that_cannot_be_used_comes_from_an_older_checkpoint(
    tmp_path: Path, damage: str
) -> None:
    checkpoint(tmp_path, 19)
    newest = checkpoint(tmp_path, 24)
    file = tmp_path / newest.directory / shard_file_name(1, 2)
    match damage:
        case "header":
            flip_bit(file, 60)
        case "missing":
            file.unlink()
        case "short":
            file.write_bytes(file.read_bytes()[:-1])
    result = repair(str(tmp_path), write=True)
    assert Replaced(file.name, HEADER, "step-00000019.gen-1") in result.replaced
    found = inspect.find(str(tmp_path))
    assert found.step == 24 and inspect.verify(str(tmp_path), found).ok
    source = CheckpointFiles(str(tmp_path)).open(found.directory, found.files[1])
    assert source.header().extra == {"step": 24}, "that of the intact file"


def test_a_checkpoint_without_its_manifest_gets_one_if_all_its_files_are_there(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, 19)
    newest = checkpoint(tmp_path, 24)
    (tmp_path / newest.directory / "manifest.json").unlink()
    result = repair(str(tmp_path), write=True)
    assert (result.step, result.replaced) == (24, [])
    assert inspect.find(str(tmp_path)).job == "tiny"


def test_the_number_of_shards_in_a_name_takes_no_memory(tmp_path: Path) -> None:
    directory = tmp_path / "step-00000024.gen-1"
    directory.mkdir()
    (directory / "shard-00000-of-9999999999999.safetensors").write_bytes(b"shard")
    with pytest.raises(UserError, match="no checkpoint with all its files"):
        repair(str(tmp_path), write=True)


def test_a_fifo_without_bytes_holds_up_no_repair(tmp_path: Path) -> None:
    checkpoint(tmp_path, 19)
    newest = write(tmp_path, {0: _shard(24, 0), 1: b""}, step=24)
    file = tmp_path / newest.directory / shard_file_name(1, 2)
    file.unlink()
    os.mkfifo(file)
    result = repair(str(tmp_path), write=True)
    assert Replaced(file.name, HEADER, "step-00000019.gen-1") in result.replaced
    assert inspect.verify(str(tmp_path), inspect.find(str(tmp_path))).ok


def test_without_any_manifest_the_jobs_name_is_needed(tmp_path: Path) -> None:
    only = checkpoint(tmp_path, 24)
    (tmp_path / only.directory / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="--job: got nothing"):
        repair(str(tmp_path), write=True)
    repair(str(tmp_path), write=True, job="team/tiny")
    assert inspect.find(str(tmp_path)).job == "team/tiny"


def test_without_write_nothing_is_changed(tmp_path: Path) -> None:
    only = checkpoint(tmp_path, 24)
    damage(tmp_path, only, 1, MOMENTS[0])
    assert repair(str(tmp_path), write=False).replaced
    assert [one.name for one in tmp_path.iterdir()] == [only.directory]


def test_an_intact_checkpoint_and_an_unknown_step_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, 24)
    with pytest.raises(UserError, match="is intact"):
        repair(str(tmp_path), write=True)
    with pytest.raises(UserError, match=r"after 10 steps.*steps: 25"):
        repair(str(tmp_path), 9, write=True)
