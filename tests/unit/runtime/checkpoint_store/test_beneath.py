"""The operator's files on a volume that jobs write to: it never leaves the directory of a job by a
link that the job has made, neither to read, write, list nor delete."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1.resilience import Retention
from holdfast.orchestrator.core.actions import Retained
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol.manifest import MANIFEST_NAME, MAX_NUMBER, directory_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime.checkpoint_store.beneath import MOST_READ_BYTES, FilesBeneath
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

from .test_store import put

MESH = Mesh(shard=2)
AT_FDCWD, RENAME_EXCHANGE = -100, 2
STEP = directory_name(5, 1)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """The files of another tenant's committed checkpoint, which have to stay as they are."""
    store = CheckpointStore(str(tmp_path / "team-a/pw"), "team-a/pw")
    store.prepare()
    store.commit(5, MESH, put(store, 5))
    before = tree(tmp_path / "team-a")
    assert len(before) == 3
    yield before
    assert tree(tmp_path / "team-a") == before


def tree(top: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in sorted(top.rglob("*")) if one.is_file()}


def store_at(tmp_path: Path, path: str) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / path), "team-b/evil", beneath=str(tmp_path))


def use_everything(store: CheckpointStore) -> list[Any]:
    """All that an operator does with a store; returns what it found there."""
    found: list[Any] = []
    calls: tuple[Callable[[], Any], ...] = (
        store.prepare, store.manifests, store.damaged, lambda: store.delete(5, 1),
        lambda: store.adopt_written(1, Retention()), lambda: store.commit(5, MESH, put(store, 5)),
        lambda: store.delete(5, 1),
        lambda: store.clean(Retained((), (9, 9), (MAX_NUMBER, MAX_NUMBER), 9)),
    )  # fmt: skip
    for call in calls:
        try:
            found.append(call())
        except (HoldfastError, OSError):
            found.append(None)
    return found


@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("team-b", "team-a"),
        ("team-b/pw", "../team-a/pw"),
        ("team-b/plant/evil", "../../team-a/pw"),
        (f"team-b/pw/{STEP}", f"../../team-a/pw/{STEP}"),
        (f"team-b/pw/{STEP}/{MANIFEST_NAME}", f"../../../team-a/pw/{STEP}/{MANIFEST_NAME}"),
    ],
    ids=["namespace", "job", "below-a-job", "step", "manifest"],
)
def test_a_link_at_no_level_leads_to_another_tenant(
    tmp_path: Path, victim: dict[str, bytes], link: str, to: str
) -> None:
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(to)
    assert victim and (tmp_path / link).exists(), "the link leads to the victim"
    path = {"team-b/plant/evil": link}.get(link, "team-b/pw")
    assert not any(one for one in use_everything(store_at(tmp_path, path)) if one != 20)


def test_a_job_whose_directory_is_a_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "team-b").mkdir()
    (tmp_path / "team-b/pw").symlink_to("../team-a")
    with pytest.raises(UserError, match=r"got .*team-b/pw \(a symbolic link, which is not foll"):
        store_at(tmp_path, "team-b/pw").prepare()


@contextmanager
def swapped(tmp_path: Path, path: str, to: str) -> Iterator[None]:
    """Let a directory and a link take turns at a path, as fast as they can."""
    place, other = tmp_path / path, tmp_path / "other"
    over = threading.Event()
    renameat2 = ctypes.CDLL(None).renameat2

    def swap() -> None:
        while not over.is_set():
            if renameat2(AT_FDCWD, bytes(place), AT_FDCWD, bytes(other), RENAME_EXCHANGE):
                for one in (place, other):  # the store has deleted one of them
                    shutil.rmtree(one, ignore_errors=True)
                    one.unlink(missing_ok=True)
                place.mkdir()
                other.symlink_to(to)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("path", "to"),
    [("team-b/pw", "../team-a/pw"), (f"team-b/pw/{STEP}", f"../../team-a/pw/{STEP}")],
)
def test_a_link_that_takes_a_directorys_place_meanwhile_leads_nowhere(
    tmp_path: Path, victim: dict[str, bytes], path: str, to: str
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    store = store_at(tmp_path, "team-b/pw")
    with swapped(tmp_path, path, to):
        for _ in range(150):
            store.fs.invalidate_cache()
            for call in (store.prepare, store.manifests, lambda: store.delete(5, 1)):
                try:
                    found = call()
                except (HoldfastError, OSError):
                    continue
                assert not found, "the victim's manifest"


def test_files_that_are_no_plain_files_hold_up_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "team-b/pw" / STEP
    directory.mkdir(parents=True)
    os.mkfifo(directory / MANIFEST_NAME)
    store = store_at(tmp_path, "team-b/pw")
    assert store.manifests() == []
    store.delete(5, 1)
    assert not directory.exists()


def test_a_file_that_claims_any_size_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(MOST_READ_BYTES + 1)
    files = FilesBeneath(str(tmp_path))
    with pytest.raises(OSError, match="File too large"):
        files.cat_file(f"{tmp_path}/x")
    assert files.cat_file(f"{tmp_path}/x", start=8, end=16) == bytes(8)


def test_a_path_elsewhere_is_an_error(tmp_path: Path) -> None:
    files = FilesBeneath(str(tmp_path / "top"))
    for path in ("/etc/passwd", f"{tmp_path}/top/../other/x", f"{tmp_path}/topped/x"):
        with pytest.raises(ValueError):
            files.cat_file(path)
