"""nodes.json: what a new controller reads from it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.backends.local import LocalBackend, LocalPaths, node_registry
from holdfast.orchestrator.backends.local.node_registry import LocalNodeRegistry, load, save
from holdfast.orchestrator.backends.local.processes import Identity
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol import files
from tests.documents import job_document

AGENT = Identity(pid=4242, start_ticks=7)


def make_job() -> TrainingJob:
    return job_from_mapping(job_document("tiny", {"entrypoint": {"script": "train.py"}}))


def test_saved_nodes_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    assert load(path) == LocalNodeRegistry()
    save(path, LocalNodeRegistry(2, {"node-0": AGENT}, {"node-1"}))
    found = load(path)
    assert (found.next_number, found.agents, found.starting) == (2, {"node-0": AGENT}, {"node-1"})
    assert [one.name for one in tmp_path.iterdir()] == ["nodes.json"]


async def test_nodes_whose_request_failed_are_not_started_by_the_next_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced before the sync of its directory fails."""
    path = tmp_path / "nodes.json"
    other = tmp_path / "none"
    paths = LocalPaths(tmp_path, path, other, other, other, tmp_path)

    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    backend = LocalBackend(make_job(), paths)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_directory", fail)
        with pytest.raises(HoldfastError, match=r"cannot be written .Input"):
            await backend.request_nodes(2, ())
    assert load(path).starting == {"node-0", "node-1"}
    assert await backend.list_nodes() == ()
    await backend.close(release=False)
    # Their names are not reused.
    assert (load(path).next_number, load(path).starting) == (2, set())


def test_after_a_reboot_no_node_is_left_and_no_name_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(node_registry, "BOOT_ID", boot)
    path = tmp_path / "nodes.json"
    save(path, LocalNodeRegistry(2, {"node-0": AGENT}, {"node-1"}))
    boot.write_text("second\n")
    found = load(path)
    # Another process may have its pid and start time, and must not be killed.
    assert (found.next_number, found.agents, found.starting) == (2, {}, set())


@pytest.mark.parametrize("data", [b"", b"{", b'{"next_number":"one"}'])
def test_a_damaged_file_is_named_with_the_fix(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(data)
    with pytest.raises(HoldfastError) as raised:
        load(path)
    assert f"{path}: cannot be read (it is damaged" in str(raised.value)
    assert "remove it and attach again" in str(raised.value)
