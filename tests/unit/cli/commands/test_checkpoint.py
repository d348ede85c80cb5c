"""`holdfast checkpoint`: checkpoints get another job, and are verified."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import training_packages
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from tests.unit.cli.conftest import Holdfast
from tests.unit.runtime.checkpoint_store.test_store import MESH, put
from tests.unit.workers.checkpoint.test_repair import checkpoint, damage


@pytest.fixture
def tier(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints of the job tiny."""
    storage = CheckpointStore(str(tmp_path / "tier"), "tiny")
    storage.prepare()
    for step in (5, 7):
        storage.commit(step, MESH, put(storage, step))
    return storage


def owners(tier: CheckpointStore) -> list[str]:
    return [one.job for one in tier.manifests()]


def test_adopt_changes_only_the_job_of_all_checkpoints(
    tier: CheckpointStore, holdfast: Holdfast
) -> None:
    before = tier.manifests()
    done = holdfast("checkpoint", "adopt", tier.path, "--job", "team/other", "--yes")
    assert done.code == 0
    assert f"2 checkpoints of tiny in {tier.path}: now belong to team/other" in done.out
    after = tier.manifests()
    assert owners(tier) == ["team/other"] * 2
    assert [(one.step, one.files, one.committed_at) for one in after] == [
        (one.step, one.files, one.committed_at) for one in before
    ]


def test_without_the_packages_that_read_tensors_verify_names_them(
    tier: CheckpointStore, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_packages, "PARTS", ("json", "no_such_package"))
    done = holdfast("checkpoint", "verify", tier.path)
    assert done.code == 2
    assert "missing: no_such_package; pip install '.[train]'" in " ".join(done.err.split())


def test_an_interrupted_adoption_is_completed_by_the_next_one(
    tier: CheckpointStore, holdfast: Holdfast
) -> None:
    words = ("checkpoint", "adopt", tier.path, "--job", "other", "--yes", "--json")
    CheckpointStore(tier.path, "other").adopt(tier.manifests()[:1])
    assert owners(tier) == ["other", "tiny"]
    assert json.loads(holdfast(*words).out)["adopted"] == ["step-00000007.gen-1"]
    assert json.loads(holdfast(*words).out)["adopted"] == []
    assert "all belong to other already" in holdfast(*words[:-1]).out


def test_without_confirmation_nothing_is_adopted(
    tier: CheckpointStore, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    done = holdfast("checkpoint", "adopt", tier.path, "--job", "other")
    assert done.code == 130 and "tiny must have ended" in done.out
    assert owners(tier) == ["tiny"] * 2


@pytest.mark.parametrize("job", ["", "Other", "a/b/c", "/x", "x/", "-x", "x" * 53])
def test_adopt_refuses_an_invalid_job_name(
    tier: CheckpointStore, holdfast: Holdfast, job: str
) -> None:
    done = holdfast("checkpoint", "adopt", tier.path, f"--job={job}", "--yes")
    assert done.code == 2
    assert f"--job: got {job}; expected NAME, or NAMESPACE/NAME" in done.err
    assert owners(tier) == ["tiny"] * 2


def test_adopt_refuses_a_directory_without_checkpoints(tmp_path: Path, holdfast: Holdfast) -> None:
    done = holdfast("checkpoint", "adopt", str(tmp_path), "--job", "other", "--yes")
    assert done.code == 2 and "no committed checkpoint" in done.err


def test_repair_shows_what_it_replaces_and_writes_a_checkpoint_that_can_be_used(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    checkpoint(tmp_path, 19)
    damage(tmp_path, checkpoint(tmp_path, 24), 1, "model.a")
    done = holdfast("checkpoint", "repair", str(tmp_path), "--yes")
    assert done.code == 0, done.err
    assert "model.a: from step-00000019.gen-1" in done.out
    assert "written: step-00000024.gen-2" in done.out
    again = holdfast("checkpoint", "repair", str(tmp_path), "--yes")
    assert again.code == 2 and "is intact" in again.err


@pytest.mark.parametrize("words", [["delete", "one"], ["checkpoint", "adopt", "/x", "--job", "b"]])
def test_over_http_confirmations_need_the_option_yes(
    words: list[str], holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "--ray", "http://127.0.0.1:1"]
    monkeypatch.setattr(
        "sys.argv", ["holdfast", *words]
    )  # the command that would run in the cluster
    done = holdfast(*words)
    assert done.code == 2 and "--yes: got nothing; expected it with --ray" in done.err
