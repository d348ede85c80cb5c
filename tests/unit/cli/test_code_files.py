"""Which files of a directory are uploaded as code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.cli import code_files
from holdfast.orchestrator.errors import UserError


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def git(directory: Path, *words: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *settings, *words], cwd=directory, check=True, capture_output=True)


@pytest.fixture(params=["repository", "below", "none"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A work tree, a directory below one, and a directory that is in none."""
    if request.param != "none":
        git(tmp_path, "init", "--quiet")
    directory = tmp_path if request.param == "repository" else tmp_path / "exp"
    directory.mkdir(exist_ok=True)
    return directory


def test_gitignore_is_honoured(place: Path) -> None:
    (place / ".gitignore").write_text("out/\n*.bin\n!keep.bin\n")
    write(place, "train.py", "lib/model.py", "out/log", "lib/a.bin", "keep.bin", "lib/x/out/b")
    write(place, "__pycache__/train.pyc", "lib/__pycache__/model.pyc")
    found = code_files.pack(place)
    assert found.files == (".gitignore", "keep.bin", "lib/model.py", "train.py")
    assert found.remarks == ()


def test_secrets_are_left_out_and_named(place: Path) -> None:
    write(place, "train.py", ".env", ".env.example", "deploy/id_rsa", "tls.PEM", ".aws/config")
    write(place, "keyboard.py", "token.py")
    found = code_files.pack(place)
    assert found.files == (".env.example", "keyboard.py", "token.py", "train.py")
    assert len(found.remarks) == 1
    assert all(name in found.remarks[0] for name in (".env", "deploy/id_rsa", "tls.PEM", ".aws"))


def test_files_that_git_keeps_are_taken_although_ignored_now(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, "kept.py", "gone.py", ".env")
    git(tmp_path, "add", "-f", ".")
    (tmp_path / ".gitignore").write_text("*.py\n")
    (tmp_path / "gone.py").unlink()
    found = code_files.pack(tmp_path)
    assert found.files == (".gitignore", "kept.py")
    assert "secrets: .env" in found.remarks[0]


def test_a_repository_inside_is_taken_along(tmp_path: Path) -> None:
    inner = tmp_path / "third_party" / "lib"
    inner.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    git(inner, "init", "--quiet")
    (inner / ".gitignore").write_text("data\n")
    write(inner, "lib.py", "data")
    write(tmp_path, "train.py")
    names = code_files.pack(tmp_path).files
    assert names == ("third_party/lib/.gitignore", "third_party/lib/lib.py", "train.py")


def test_links_out_and_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    place = tmp_path / "job"
    write(place, "train.py", "conf/a.yaml")
    write(tmp_path, "outside")
    (place / "inside.yaml").symlink_to("conf/a.yaml")
    (place / "confs").symlink_to("conf")
    (place / "data").symlink_to(tmp_path / "outside")
    (place / "up").symlink_to("../outside")
    os.mkfifo(place / "pipe")
    found = code_files.pack(place)
    assert found.files == ("conf/a.yaml", "confs", "inside.yaml", "train.py")
    assert any("data, up" in remark for remark in found.remarks)


def test_without_git_a_gitignore_is_refused_rather_than_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train.py", "lib/a.py", "__pycache__/a.pyc", ".venv/lib/b.py", ".env")
    monkeypatch.setenv("PATH", "")
    assert code_files.pack(tmp_path).files == ("lib/a.py", "train.py")
    write(tmp_path, "lib/.gitignore")
    with pytest.raises(UserError, match="install git"):
        code_files.pack(tmp_path)


def test_what_is_too_large_is_refused_with_the_largest_files(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / "weights.bin").write_bytes(os.urandom(limits.MAX_CODE_ARCHIVE_BYTES))
    with pytest.raises(UserError, match=r"compressed.*weights\.bin \(8\.0 MiB\).*\.gitignore"):
        code_files.pack(tmp_path)
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(limits.MAX_CODE_BYTES)
    with pytest.raises(UserError, match=r"zeros \(64\.0 MiB\), weights\.bin"):
        code_files.pack(tmp_path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads every file")
    write(tmp_path, "train.py")
    (tmp_path / "train.py").chmod(0)
    with pytest.raises(UserError, match=r"train\.py"):
        code_files.pack(tmp_path)
