"""`holdfast checkpoint adopt`: whose checkpoints are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

from ..runtime.test_checkpoint_store import MESH, put
from .conftest import Holdfast


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


def test_all_of_them_are_given_to_another_job_and_nothing_else_changes(
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


def test_what_was_cut_short_is_finished_and_what_is_done_stays(
    tier: CheckpointStore, holdfast: Holdfast
) -> None:
    words = ("checkpoint", "adopt", tier.path, "--job", "other", "--yes", "--json")
    CheckpointStore(tier.path, "other").adopt(tier.manifests()[:1])
    assert owners(tier) == ["other", "tiny"]
    assert json.loads(holdfast(*words).out)["adopted"] == ["step-00000007.gen-1"]
    assert json.loads(holdfast(*words).out)["adopted"] == []
    assert "all belong to other already" in holdfast(*words[:-1]).out


def test_without_a_yes_nothing_is_given_away(
    tier: CheckpointStore, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    done = holdfast("checkpoint", "adopt", tier.path, "--job", "other")
    assert done.code == 130 and "tiny must have ended" in done.out
    assert owners(tier) == ["tiny"] * 2


@pytest.mark.parametrize("job", ["", "Other", "a/b/c", "/x", "x/", "-x", "x" * 53])
def test_no_job_can_be_called_so(tier: CheckpointStore, holdfast: Holdfast, job: str) -> None:
    done = holdfast("checkpoint", "adopt", tier.path, f"--job={job}", "--yes")
    assert done.code == 2
    assert f"--job: got {job}; expected NAME, or NAMESPACE/NAME" in done.err
    assert owners(tier) == ["tiny"] * 2


def test_where_there_is_none_none_is_given(tmp_path: Path, holdfast: Holdfast) -> None:
    done = holdfast("checkpoint", "adopt", str(tmp_path), "--job", "other", "--yes")
    assert done.code == 2 and "no committed checkpoint" in done.err


@pytest.mark.parametrize("words", [["delete", "one"], ["checkpoint", "adopt", "/x", "--job", "b"]])
def test_where_nobody_can_be_asked_a_yes_is_wanted(
    words: list[str], holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "--ray", "http://127.0.0.1:1"]
    monkeypatch.setattr("sys.argv", ["holdfast", *words])  # what would be run inside
    done = holdfast(*words)
    assert done.code == 2 and "--yes: got nothing; expected it with --ray" in done.err
