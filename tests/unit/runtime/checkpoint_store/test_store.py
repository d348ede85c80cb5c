"""The storage tier: a checkpoint exists with its manifest, which only complete ones get."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1.resilience import Retention
from holdfast.orchestrator.core.actions import Retained
from holdfast.orchestrator.protocol.facts import CoverageSum, ShardFile
from holdfast.orchestrator.protocol.manifest import (
    MANIFEST_NAME,
    MAX_NUMBER,
    NOTE_SUFFIX,
    ShardNote,
    directory_name,
    encode_note,
    shard_file_name,
)
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore, CommitRefused

MESH = Mesh(replicate=2, shard=2)


@pytest.fixture(params=["local", "beneath", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """A directory, one below others' directory, and fsspec's memory as an object store."""
    path = f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "tier")
    beneath = str(tmp_path) if request.param == "beneath" else ""
    storage = CheckpointStore(path, "tiny", beneath=beneath)
    storage.prepare()
    return storage


def put(
    storage: CheckpointStore, step: int, generation: int = 1, num_bytes: int = 10
) -> tuple[ShardFile, ...]:
    files = []
    for shard in range(2):
        name = shard_file_name(shard, 2)
        directory = f"{storage.root}/{directory_name(step, generation)}"
        storage.fs.makedirs(directory, exist_ok=True)
        storage.fs.pipe_file(f"{directory}/{name}", bytes(num_bytes))
        files.append(ShardFile(step, generation, shard, 2, name, num_bytes, "00"))
    return tuple(files)


def test_a_complete_checkpoint_is_committed_and_found(storage: CheckpointStore) -> None:
    first, second = put(storage, 5), put(storage, 7, generation=2)
    assert storage.manifests() == []
    assert storage.commit(7, MESH, second) == 20
    assert storage.commit(5, MESH, tuple(reversed(first))) == 20
    found = storage.manifests()
    assert [(one.step, one.generation) for one in found] == [(5, 1), (7, 2)]
    assert found[0].files == first and found[0].mesh == MESH and found[0].job == "tiny"


def test_a_commit_with_a_missing_file_is_refused(storage: CheckpointStore) -> None:
    files = put(storage, 5)
    storage.fs.rm_file(f"{storage.root}/{directory_name(5, 1)}/{files[1].file}")
    with pytest.raises(CommitRefused, match="missing here"):
        storage.commit(5, MESH, files)
    assert storage.manifests() == []


def test_a_commit_with_a_file_of_another_size_is_refused(storage: CheckpointStore) -> None:
    files = put(storage, 5)
    put(storage, 5, num_bytes=9)
    with pytest.raises(CommitRefused, match="got 9 bytes; expected 10"):
        storage.commit(5, MESH, files)


def test_files_of_several_generations_are_never_one_checkpoint(storage: CheckpointStore) -> None:
    first, second = put(storage, 5), put(storage, 5, generation=2)
    with pytest.raises(CommitRefused, match="generation 2; expected step 5, generation 1"):
        storage.commit(5, MESH, (first[0], second[1]))
    with pytest.raises(CommitRefused, match=r"got 1 with shards \[0\]; expected 0 to 1"):
        storage.commit(5, MESH, first[:1])


def test_a_deleted_checkpoint_is_gone_and_can_be_deleted_again(storage: CheckpointStore) -> None:
    storage.commit(5, MESH, put(storage, 5))
    storage.commit(6, MESH, put(storage, 6))
    storage.delete(5, 1)
    storage.delete(5, 1)
    assert [one.step for one in storage.manifests()] == [6]
    assert not storage.fs.exists(f"{storage.root}/{directory_name(5, 1)}")


def test_a_damaged_manifest_is_ignored(storage: CheckpointStore) -> None:
    storage.commit(5, MESH, put(storage, 5))
    put(storage, 6)
    storage.fs.pipe_file(f"{storage.root}/{directory_name(6, 1)}/{MANIFEST_NAME}", b"{half")
    assert [one.step for one in storage.manifests()] == [5]


WRONG_FILES = {
    "another directory's": {"file": f"../{directory_name(5, 1)}/{shard_file_name(0, 2)}"},
    "another shard's": {"file": shard_file_name(1, 2)},
    "another mesh's": {"num_shards": 4, "file": shard_file_name(0, 4)},
}


@pytest.mark.parametrize("wrong", WRONG_FILES.values(), ids=WRONG_FILES)
def test_only_the_name_that_is_due_is_committed_or_read(
    storage: CheckpointStore, wrong: dict[str, Any]
) -> None:
    storage.commit(5, MESH, put(storage, 5))
    first, second = put(storage, 6)
    reported = (msgspec.structs.replace(first, **wrong), second)
    with pytest.raises(CommitRefused, match=r"file: got .*; expected 'shard-00000-of-00002.safe"):
        storage.commit(6, MESH, reported)
    note(storage, second)
    data = encode_note(ShardNote(file=reported[0], mesh=MESH))
    directory = f"{storage.root}/{directory_name(6, 1)}"
    storage.fs.pipe_file(f"{directory}/{first.file}{NOTE_SUFFIX}", data)
    assert storage.adopt_written(1, Retention()) == []
    storage.commit(6, MESH, (first, second))
    path = f"{directory}/{MANIFEST_NAME}"
    written = json.loads(storage.fs.cat_file(path))
    written["files"][0] |= wrong
    storage.fs.pipe_file(path, json.dumps(written).encode())
    assert [one.step for one in storage.manifests()] == [5]
    assert storage.damaged() == [directory_name(6, 1)]


@pytest.mark.parametrize("size", [-1, 0, 20_000_000, 2**62, 2**63, 10**30])
def test_a_manifest_of_a_huge_mesh_is_damaged_and_hides_no_other(
    storage: CheckpointStore, size: int
) -> None:
    for step in (5, 6):
        storage.commit(step, MESH, put(storage, step))
    path = f"{storage.root}/{directory_name(6, 1)}/{MANIFEST_NAME}"
    written = json.loads(storage.fs.cat_file(path))
    for axis in ("shard", "replicate"):
        changed = {**written, "mesh": {**written["mesh"], axis: size}}
        storage.fs.pipe_file(path, json.dumps(changed).encode())
        tracemalloc.start()
        assert [one.step for one in storage.manifests()] == [5]
        assert storage.damaged() == [directory_name(6, 1)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


def test_what_is_no_file_or_too_large_for_a_manifest_hides_no_other(tmp_path: Path) -> None:
    storage = CheckpointStore(str(tmp_path), "tiny")
    for step in (5, 6, 7):
        storage.commit(step, MESH, put(storage, step))
    (tmp_path / directory_name(6, 1) / MANIFEST_NAME).unlink()
    os.mkfifo(tmp_path / directory_name(6, 1) / MANIFEST_NAME)
    os.truncate(tmp_path / directory_name(7, 1) / MANIFEST_NAME, 1 << 40)
    assert [one.step for one in storage.manifests()] == [5]


def test_a_shard_with_an_unreadable_header_is_not_taken_over(tmp_path: Path) -> None:
    storage = CheckpointStore(str(tmp_path), "tiny")
    for header in (b"\xff" * 64, (2**41).to_bytes(8, "little") + bytes(56), b"\2{}" + bytes(61)):
        files = put(storage, 9, generation=3, num_bytes=64)
        unproved = [
            msgspec.structs.replace(file, coverage=CoverageSum(1, number))
            for number, file in enumerate(files)
        ]
        for file in unproved:
            (tmp_path / directory_name(9, 3) / file.file).write_bytes(header)
        note(storage, *unproved)
        assert storage.adopt_written(3, Retention()) == []


def test_directories_with_a_damaged_manifest_are_named(storage: CheckpointStore) -> None:
    storage.commit(5, MESH, put(storage, 5))
    put(storage, 7)
    assert storage.damaged() == []
    storage.fs.pipe_file(f"{storage.root}/{directory_name(5, 1)}/{MANIFEST_NAME}", b"{}")
    assert storage.damaged() == [directory_name(5, 1)]


def test_stray_files_with_the_name_of_a_checkpoint_are_ignored(tmp_path: Path) -> None:
    storage = CheckpointStore(str(tmp_path), "tiny")
    storage.commit(5, MESH, put(storage, 5))
    (tmp_path / "step-00099999.gen-1").write_text("")
    (tmp_path / directory_name(9, 2) / MANIFEST_NAME).mkdir(parents=True)
    assert [one.step for one in storage.manifests()] == [5]


def test_a_directory_that_is_not_shared_is_refused_with_the_reason(tmp_path: Path) -> None:
    """A node wrote its shard to its own disk, so the controller must not commit it."""
    storage = CheckpointStore(str(tmp_path / "here"), "job")
    with pytest.raises(CommitRefused, match="a directory must be one volume that all nodes and"):
        storage.commit(5, Mesh(), (ShardFile(5, 1, 0, 1, shard_file_name(0, 1), 3, "00"),))


# -- written without a controller ------------------------------------------------------------------
def note(storage: CheckpointStore, *files: ShardFile, mesh: Mesh = MESH) -> None:
    for file in files:
        directory = f"{storage.root}/{directory_name(file.step, file.generation)}"
        data = encode_note(ShardNote(file=file, mesh=mesh))
        storage.fs.pipe_file(f"{directory}/{file.file}{NOTE_SUFFIX}", data)


def test_a_complete_step_that_agents_wrote_without_a_controller_is_committed(
    storage: CheckpointStore,
) -> None:
    files = put(storage, 9, generation=3)
    note(storage, *files)
    assert storage.manifests() == [], "not before a controller has looked"
    (adopted,) = storage.adopt_written(3, Retention())
    assert (adopted.step, adopted.generation, adopted.mesh) == (9, 3, MESH)
    assert adopted.files == files and storage.manifests() == [adopted]
    assert storage.adopt_written(3, Retention()) == [], "it is committed already"


def test_what_is_not_complete_or_of_an_older_generation_is_not_adopted(
    storage: CheckpointStore,
) -> None:
    note(storage, *put(storage, 5, generation=2))
    first, _second = put(storage, 6, generation=3)
    note(storage, first)
    put(storage, 7, generation=3)
    short = put(storage, 8, generation=3)
    note(storage, *short)
    storage.fs.pipe_file(f"{storage.root}/{directory_name(8, 3)}/{short[1].file}", b"torn")
    mixed = put(storage, 9, generation=3)
    note(storage, mixed[0])
    note(storage, mixed[1], mesh=Mesh(shard=2))
    torn = put(storage, 10, generation=3)
    note(storage, *torn)
    place = f"{storage.root}/{directory_name(10, 3)}/{torn[0].file}{NOTE_SUFFIX}"
    storage.fs.pipe_file(place, b"{")
    assert storage.adopt_written(3, Retention()) == [] and storage.manifests() == []


def test_of_many_steps_that_agents_wrote_only_those_that_are_kept_are_committed(
    storage: CheckpointStore,
) -> None:
    """A controller that was away for long: every commit costs a takeover its time."""
    for step in range(9, 99, 10):
        note(storage, *put(storage, step, generation=3))
    adopted = storage.adopt_written(3, Retention(keep_last=2, keep_every_steps=40))
    assert [one.step for one in adopted] == [39, 79, 89]
    assert storage.manifests() == adopted


def test_only_what_is_retained_stays(storage: CheckpointStore) -> None:
    for step in (5, 6, 8, 9, 30):
        storage.commit(step, MESH, put(storage, step, generation=1))
    others = CheckpointStore(storage.path, "another job")
    others.commit(4, MESH, put(storage, 4, generation=1))
    for step, generation in ((3, 1), (7, 1), (8, 2), (9, 3), (20, 2), (40, 3), (1, 4)):
        put(storage, step, generation)
    storage.fs.makedirs(f"{storage.root}/other", exist_ok=True)

    def clean(abandoned: tuple[int, int]) -> set[str]:
        kept = Retained(((6, 1), (7, 1)), newest=(9, 1), abandoned=abandoned, generation=3)
        return set(storage.clean(kept))

    assert clean((9, 1)) == {directory_name(*at) for at in ((3, 1), (5, 1), (8, 1), (8, 2))} | {
        directory_name(9, 1)
    }
    assert clean((MAX_NUMBER, MAX_NUMBER)) == {
        directory_name(*at) for at in ((9, 3), (20, 2), (40, 3))
    }
    assert clean((MAX_NUMBER, MAX_NUMBER)) == set()
    assert [one.step for one in storage.manifests()] == [4, 6, 30]
    assert storage.fs.exists(f"{storage.root}/{directory_name(1, 4)}"), "a later generation's"


def test_a_checkpoint_that_cannot_be_deleted_does_not_protect_others(
    storage: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (5, 6, 7):
        storage.commit(step, MESH, put(storage, step))
    delete = storage.delete

    def fails_once(step: int, generation: int) -> None:
        if step == 5:
            raise PermissionError("5 is another user's")
        delete(step, generation)

    monkeypatch.setattr(storage, "delete", fails_once)
    with pytest.raises(PermissionError):
        storage.clean(Retained(((7, 1),), newest=(7, 1), abandoned=(7, 1), generation=1))
    assert [one.step for one in storage.manifests()] == [5, 7]
