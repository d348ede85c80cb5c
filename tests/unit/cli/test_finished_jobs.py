"""Records of finished jobs: expiry and deletion."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, job_to_mapping
from holdfast.orchestrator.backends.local.node_registry import LocalNodeRegistry, save
from holdfast.orchestrator.backends.local.processes import identify
from holdfast.orchestrator.cli.output import date
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import CancelRequested, JobSubmitted
from holdfast.orchestrator.core.journal import Record, frame
from holdfast.orchestrator.hosts.local import service
from holdfast.orchestrator.hosts.local.job_records import expire, read_view
from holdfast.orchestrator.protocol import training_packages
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from tests.documents import job_document

from ..journal import files
from .conftest import Holdfast


def ended_job(home: Path, name: str, ended: bool = True, **more: object) -> JobDirectory:
    """A job that was cancelled ten seconds after its submission, with a checkpoint."""
    entry = {"entrypoint": {"script": "train.py"}}
    job = job_from_mapping(job_document(name, {**entry, **more}))
    directory = Home(home).create(job, home)
    (directory.path / "checkpoints" / "shard").write_text("data")
    submitted = JobSubmitted(job_id="x", spec=job_to_mapping(job), spec_directory="/")
    files.write(directory.journal, Record(0, submitted))
    if ended:
        files.write(directory.journal, Record(10 * SECOND_NS, CancelRequested()))
    assert read_view(directory).state == ("cancelled" if ended else "pending")
    return directory


def test_the_record_of_a_finished_job_is_deleted_when_its_ttl_is_over(tmp_path: Path) -> None:
    ended_job(tmp_path, "soon", ttlSecondsAfterFinished=5)
    ended_job(tmp_path, "later", ttlSecondsAfterFinished=60)
    ended_job(tmp_path, "never")
    ended_job(tmp_path, "alive", ended=False, ttlSecondsAfterFinished=0)
    assert expire(Home(tmp_path), 14 * SECOND_NS) == []
    assert expire(Home(tmp_path), 15 * SECOND_NS) == ["soon"]
    assert [one.name for one in Home(tmp_path).list()] == ["alive", "later", "never"]


def test_a_job_with_a_running_controller_does_not_expire(tmp_path: Path) -> None:
    directory = ended_job(tmp_path, "soon", ttlSecondsAfterFinished=0)
    with directory.locked():
        assert expire(Home(tmp_path), 99 * SECOND_NS) == []
    assert expire(Home(tmp_path), 99 * SECOND_NS) == ["soon"]


def test_without_a_terminal_a_deletion_needs_the_option_yes(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    ended_job(tmp_path / "home", "done")
    result = holdfast("delete", "done")
    assert result.code == 2 and "stdin is not a terminal: pass --yes" in result.err
    assert [one.name for one in Home(tmp_path / "home").list()] == ["done"]


@pytest.mark.parametrize(
    ("columns", "last"), [("200", "SUBMITTED"), ("70", "INCIDENTS"), ("33", "STEPS")]
)
def test_a_narrow_list_leaves_columns_out_and_never_cuts_a_name(
    tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch, columns: str, last: str
) -> None:
    ended_job(tmp_path / "home", "a-long-name")
    monkeypatch.setenv("COLUMNS", columns)
    header, row = holdfast("status").out.splitlines()
    assert header.split()[-1] == last and row.startswith("a-long-name   cancelled   -")
    assert max(map(len, (header, row))) <= int(columns)


def test_checkpoints_can_be_kept_when_the_record_is_deleted(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    ended_job(tmp_path / "home", "done")
    kept = tmp_path / "kept"
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", kept)
    assert result.code == 0
    assert f"spec.checkpoint.path: {kept}" in result.out
    assert (kept / "shard").read_text() == "data"
    assert Home(tmp_path / "home").list() == []


def test_checkpoints_never_overwrite_what_is_there(tmp_path: Path, holdfast: Holdfast) -> None:
    directory = ended_job(tmp_path / "home", "done")
    (tmp_path / "kept").mkdir()
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", tmp_path / "kept")
    assert result.code == 2
    assert "--keep-checkpoints: got" in result.err and "a new, writable directory" in result.err
    assert (directory.path / "checkpoints" / "shard").exists()


def test_checkpoints_cannot_be_moved_into_the_deleted_directory(
    tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ended_job(tmp_path / "home", "done")
    monkeypatch.chdir(directory.path)
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", "kept")
    assert result.code == 2
    assert "inside the directory to delete" in result.err
    assert (directory.path / "checkpoints" / "shard").exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_checkpoints_elsewhere_stay_there(
    is_damaged: bool, tmp_path: Path, holdfast: Holdfast
) -> None:
    directory = ended_job(tmp_path / "home", "done", checkpoint={"path": str(tmp_path / "there")})
    if is_damaged:
        files.live(directory.journal).write_text("nonsense that is long enough to be no journal")
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", tmp_path / "kept")
    assert result.code == 2
    assert f"checkpoints stay in {tmp_path / 'there'} (spec.checkpoint.path)" in result.err
    assert directory.path.exists() and not (tmp_path / "kept").exists()


@pytest.mark.parametrize("name", ["job.json", "journal/00000001"])
def test_a_damaged_job_can_be_deleted_once_none_of_its_processes_runs(
    tmp_path: Path, holdfast: Holdfast, name: str
) -> None:
    directory = ended_job(tmp_path / "home", "done")
    (directory.path / name).write_text("nonsense that is long enough to be no journal")
    agent = identify(os.getpid())
    assert agent is not None
    save(directory.nodes_file, LocalNodeRegistry(agents={"node-0": agent}))
    refused = holdfast("delete", "done", "--yes")
    assert refused.code == 1 and "damaged" in refused.err
    save(directory.nodes_file, LocalNodeRegistry())
    kept = tmp_path / "kept"
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", kept)
    assert result.code == 0
    assert (kept / "shard").read_text() == "data"
    assert Home(tmp_path / "home").list() == []


def test_a_job_directory_without_a_record_can_be_deleted_as_the_message_says(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    """The state after an interrupted deletion."""
    directory = ended_job(tmp_path / "home", "done")
    job, checkpoints = directory.job(), directory.path / "checkpoints"
    (directory.path / "job.json").unlink()
    spec = tmp_path / "job.yaml"
    spec.write_text(json.dumps(job_to_mapping(job)))
    (tmp_path / "train.py").write_text("")
    taken = holdfast("run", spec)
    assert taken.code == 2
    assert "job.json: is missing" in taken.err and "`holdfast delete done`" in taken.err
    agent = identify(os.getpid())
    assert agent is not None
    save(directory.nodes_file, LocalNodeRegistry(agents={"node-0": agent}))
    assert holdfast("delete", "done", "--yes").code == 1 and checkpoints.exists()
    save(directory.nodes_file, LocalNodeRegistry())
    with directory.locked():
        assert holdfast("delete", "done", "--yes").code == 1 and checkpoints.exists()
    result = holdfast("delete", "done", "--yes", "--keep-checkpoints", tmp_path / "kept")
    assert result.code == 0
    assert (tmp_path / "kept" / "shard").read_text() == "data"
    Home(tmp_path / "home").create(job, tmp_path)  # its name is free


@pytest.mark.parametrize("name", ["job.json", "journal/00000001"])
def test_a_job_whose_files_cannot_be_read_now_is_not_deleted(
    tmp_path: Path, holdfast: Holdfast, name: str
) -> None:
    """The same on an unavailable share, for which a directory stands: root reads any file."""
    directory = ended_job(tmp_path / "home", "waiting", ended=False)
    (directory.path / name).unlink()
    (directory.path / name).mkdir()
    result = holdfast("delete", "waiting", "--yes")
    assert result.code == 1 and f"{name}: cannot be read (Is a directory)" in result.err
    assert (directory.path / "checkpoints" / "shard").exists()


def test_a_job_whose_spec_another_version_wrote_is_not_deleted(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    directory = ended_job(tmp_path / "home", "newer", ended=False)
    record = directory.record()
    record["document"]["spec"]["gravity"] = 1
    (directory.path / "job.json").write_text(json.dumps(record))
    result = holdfast("delete", "newer", "--yes")
    assert result.code == 2
    assert "spec.gravity: got an unknown key" in result.err
    assert f"with the Holdfast that wrote it, or remove {directory.path}" in result.err
    assert (directory.path / "checkpoints" / "shard").exists()


def test_a_job_whose_journal_another_version_wrote_is_not_deleted(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    directory = ended_job(tmp_path / "home", "newer", ended=False)
    journal = files.claimed(directory.journal)
    journal._pending.append(frame(msgspec.msgpack.encode((1, {"type": "teleported"}))))
    files.append(journal, Record(2, CancelRequested()))
    journal.close()
    result = holdfast("delete", "newer", "--yes")
    assert result.code == 1 and f"wrote it, or remove {directory.path} once" in result.err
    assert (directory.path / "checkpoints" / "shard").exists()


def test_deleting_a_damaged_job_warns_that_it_may_not_have_ended(
    tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ended_job(tmp_path / "home", "waiting", ended=False)
    (directory.path / "job.json").write_text("nonsense")
    terminal = io.StringIO("n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    refused = holdfast("delete", "waiting")
    assert refused.code == 130
    assert "of a job that may still run: its state is unknown" in refused.out
    assert (directory.path / "checkpoints" / "shard").exists()
    result = holdfast("delete", "waiting", "--yes")
    assert result.code == 0 and "so the job may still run" in result.out
    assert not directory.path.exists()


def test_a_job_that_is_too_big_for_this_machine_is_not_started(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: holdfast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: big}\n"
        "spec: {entrypoint: {script: train.py}, nodes: {max: 100000}}\n"
    )
    result = holdfast("run", path)
    assert result.code == 2
    assert "spec.nodes.max: got 100000" in result.err and "on this machine" in result.err
    assert holdfast("spec validate", path).code == 0, "it may be meant for another one"


VERBS = {
    "cancel done": "cancel",
    "suspend done": "suspend",
    "resume done": "resume",
    "resize done 1": "resize",
    "debug kill-worker done": "break",
    "debug kill-node done": "break",
    "debug stacks done": "look at",
    "debug profile done": "profile",
    "checkpoint save done": "save",
    "checkpoint save done --wait": "save",
}


@pytest.mark.parametrize("line", VERBS)
def test_a_verb_on_a_job_that_has_ended_says_so(
    line: str, tmp_path: Path, holdfast: Holdfast
) -> None:
    ended_job(tmp_path / "home", "done")
    before = read_view(Home(tmp_path / "home").find("done"))
    result = holdfast(*line.split())
    at = date(10 * SECOND_NS)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: job done: was cancelled ({at}); nothing to {VERBS[line]}\n"
    assert read_view(Home(tmp_path / "home").find("done")) == before


def test_attaching_to_a_job_that_has_ended_prints_its_report_and_changes_nothing(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    directory = ended_job(tmp_path / "home", "done")
    before = files.live(directory.journal).read_bytes()
    for _ in range(2):
        result = holdfast("attach", "done")
        assert result.code == 1 and result.out.startswith("done  cancelled\n")
        assert result.out == holdfast("status", "done", "--report").out
    assert files.live(directory.journal).read_bytes() == before
    assert json.loads(holdfast("attach", "done", "--json").out)["controller_restarts"] == 0


@pytest.mark.parametrize("verb", ["again", "attach"])
def test_a_job_stays_as_it_is_where_packages_are_missing(
    verb: str, tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = ended_job(tmp_path / "home", "demo", ended=verb == "again")
    (tmp_path / "home" / "train.py").touch()
    monkeypatch.setattr(training_packages, "PARTS", ("no_such_package",))
    before = read_view(directory)
    result = holdfast(verb, "demo")
    assert result.code == 2 and "missing: no_such_package; pip install" in result.err
    assert read_view(directory) == before and not directory.host_socket.exists()


def test_a_takeover_says_what_ctrl_c_does(
    tmp_path: Path, holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_job(tmp_path / "home", "demo", ended=False)
    monkeypatch.setattr(service, "run_job", lambda *_, **_options: sys.exit(77))
    result = holdfast("attach", "demo")
    assert result.code == 77
    assert "had no controller: this command is it now; Ctrl-C cancels the job" in result.out


def test_nodes_that_a_killed_controller_has_not_released_can_still_be_controlled(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    directory = ended_job(tmp_path / "home", "done")
    agent = identify(os.getpid())
    assert agent is not None
    save(directory.nodes_file, LocalNodeRegistry(agents={"node-0": agent}))
    result = holdfast("cancel", "done")
    assert result.code == 1 and "take the job over with `holdfast attach done`" in result.err
