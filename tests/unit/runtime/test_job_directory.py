"""Job directories: creating, finding, locking and deleting them."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.runtime import job_directory as home_module
from holdfast.orchestrator.runtime.job_directory import HOME_VARIABLE, Home, copy_tree
from tests.documents import job_document


def make_job(name: str = "tiny") -> TrainingJob:
    return job_from_mapping(
        job_document(name, {"entrypoint": {"script": "train.py"}, "env": {"A": "ä"}})
    )


def test_a_created_job_is_found_with_everything_it_was_given(tmp_path: Path) -> None:
    directory = Home(tmp_path).create(make_job(), tmp_path / "specs")
    found = Home(tmp_path).find("tiny")
    assert found.job() == make_job()
    assert found.spec_directory == str(tmp_path / "specs")
    assert found.job_id == directory.job_id and len(found.job_id) == 16
    assert found.logs.is_dir()
    assert [job.name for job in Home(tmp_path).list()] == ["tiny"]


@pytest.mark.parametrize("chosen", ["", "~no-such-user/x"])
def test_an_unknown_home_directory_is_reported(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(path: str) -> str:
        return path

    monkeypatch.setenv(HOME_VARIABLE, chosen)
    monkeypatch.setattr(os.path, "expanduser", unknown)  # as without $HOME and a user account
    message = f"{chosen or '~/.holdfast'}, whose ~ has no home directory on this machine"
    with pytest.raises(UserError, match=rf"\${HOME_VARIABLE}: got {message}"):
        Home()


def test_the_token_is_secret_and_new_for_every_job(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first, second = (home.create(make_job(name), tmp_path) for name in ("one", "two"))
    assert first.token() != second.token() and len(first.token()) == 64
    for path in (first.token_file, first.path / "job.json", first.path / "lock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700


def test_there_is_one_controller(tmp_path: Path) -> None:
    directory = Home(tmp_path).create(make_job(), tmp_path)
    assert not directory.controller_alive()
    with directory.locked():
        assert directory.controller_alive()
        directory.write_controller("127.0.0.1", 4000, 5000)
        place = directory.controller()
        assert place == {
            "pid": os.getpid(), "address": "127.0.0.1", "port": 4000, "metrics_port": 5000,
        }  # fmt: skip
        with pytest.raises(UserError, match=f"a controller is already running .pid {os.getpid()}"):
            directory.locked().__enter__()
    assert directory.controller() is None


def test_a_full_disk_is_reported_by_a_starting_controller(tmp_path: Path) -> None:
    directory = Home(tmp_path).create(make_job(), tmp_path)
    directory.controller_file.mkdir()  # a file cannot replace a directory
    with pytest.raises(HoldfastError, match=r"controller\.json: cannot be written .*attach again"):
        directory.write_controller("127.0.0.1", 4000, 5000)


def test_an_unknown_job_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(UserError, match="holds none"):
        home.find("nothing")
    home.create(make_job(), tmp_path)
    for name in ("nothing", "../jobs/tiny", ""):
        with pytest.raises(UserError, match="expected one of tiny"):
            home.find(name)


def test_a_home_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    """The home is a file; root could write to any directory."""
    (tmp_path / "home").write_text("")
    with pytest.raises(UserError, match=r"--home: got .*; expected a directory that can be"):
        Home(tmp_path / "home").create(make_job(), tmp_path)


def test_a_home_too_long_for_a_socket_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at most 107"):
        Home(tmp_path / ("x" * 100)).create(make_job(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_home_comes_from_the_option_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "environment"))
    assert Home().path == tmp_path / "environment"
    assert Home(tmp_path / "option").path == tmp_path / "option"


def test_the_checkpoint_path_is_relative_to_the_spec(tmp_path: Path) -> None:
    job = make_job()
    directory = Home(tmp_path).create(job, tmp_path / "specs")

    def path(value: str | None) -> str:
        checkpoint = job.spec.checkpoint.model_copy(update={"path": value})
        spec = job.spec.model_copy(update={"checkpoint": checkpoint})
        return directory.checkpoint_path(job.model_copy(update={"spec": spec}))

    assert path(None) == str(directory.path / "checkpoints")
    assert path("here") == str(tmp_path / "specs/here")
    assert path("s3://bucket/there") == "s3://bucket/there"


def test_a_removed_job_leaves_its_name_free(tmp_path: Path) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)
    directory.remove()
    assert home.list() == []
    with pytest.raises(UserError, match="tiny: was deleted in the meantime"):
        directory.remove()
    home.create(make_job(), tmp_path)


def test_an_interrupted_deletion_frees_the_name_and_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)

    def interrupted(path: Path) -> None:
        (path / "job.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        directory.remove()
    assert home.list() == []
    home.create(make_job(), tmp_path)
    assert len(list(home.jobs.iterdir())) == 2
    home.sweep()
    assert [path.name for path in home.jobs.iterdir()] == ["tiny"]


def test_a_job_that_was_deleted_and_created_again_meanwhile_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    directory = home.create(make_job(), tmp_path)
    lock = home_module._lock

    def overtaken(fd: int) -> bool:
        monkeypatch.setattr(home_module, "_lock", lock)
        home.directory("tiny").remove()
        home.create(make_job(), tmp_path)
        return lock(fd)

    monkeypatch.setattr(home_module, "_lock", overtaken)
    with pytest.raises(UserError, match="tiny: was deleted in the meantime"):
        directory.remove()
    assert home.find("tiny").job() == make_job()


def test_checkpoints_are_kept_on_another_file_system_too(tmp_path: Path) -> None:
    other = Path("/dev/shm")  # exists on every Linux
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    directory = Home(tmp_path).create(make_job(), tmp_path)
    (directory.path / "checkpoints" / "shard").write_text("data")
    with tempfile.TemporaryDirectory(dir=other) as place:
        directory.remove(Path(place) / "kept")
        assert (Path(place) / "kept" / "shard").read_text() == "data"
    assert not directory.path.exists()


def test_a_record_with_a_missing_field_is_damaged(tmp_path: Path) -> None:
    directory = Home(tmp_path).create(make_job(), tmp_path)
    (directory.path / "job.json").write_text('{"job_id": "x", "spec_directory": "/"}')
    with pytest.raises(HoldfastError, match=r"job\.json: is damaged \(no document\)"):
        directory.job()


def test_an_unreadable_directory_affects_only_its_own_job(tmp_path: Path) -> None:
    """A loop of links, which root cannot read either."""
    home = Home(tmp_path)
    home.create(make_job(), tmp_path)
    (home.jobs / "other").symlink_to("other")
    assert [job.name for job in home.list()] == ["tiny"]
    with pytest.raises(HoldfastError, match=r"other/job\.json: cannot be read"):
        home.find("other")


def test_a_home_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "jobs").symlink_to("jobs")
    with pytest.raises(UserError, match=r"--home: got .*; expected a directory that can be read"):
        Home(tmp_path).list()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "step-10").mkdir(parents=True)
    (path / "step-10" / "shard").write_text("data")
    return path


def there(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir())


def test_a_copy_gets_its_name_once_it_is_durable(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any moment leaves nothing that looks like a complete copy."""
    place, before = tmp_path / "kept", list[bool]()
    monkeypatch.setattr(os, "sync", lambda: before.append(place.exists()))
    copy_tree(source, place)
    assert before == [False]
    assert (place / "step-10" / "shard").read_text() == "data"
    assert there(place) == ["kept", "source"]


@pytest.mark.parametrize("names", [[], ["mine"]])
def test_copying_to_an_existing_directory_changes_nothing(
    tmp_path: Path, source: Path, names: list[str]
) -> None:
    place = tmp_path / "kept"
    place.mkdir()
    for name in names:
        (place / name).write_text("")
    with pytest.raises(FileExistsError):
        copy_tree(source, place)
    assert [path.name for path in place.iterdir()] == names
    assert there(place) == ["kept", "source"]


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, source: Path) -> None:
    (source / "lost").symlink_to("nowhere")
    with pytest.raises(OSError, match="No such file"):
        copy_tree(source, tmp_path / "kept")
    assert there(tmp_path / "kept") == ["source"]
