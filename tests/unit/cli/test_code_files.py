"""Files of a directory that are uploaded as code."""

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


SECRETS = """
.env .env~ .env-prod .env_local .env.local .envrc env.prod prod.env .env/x.txt secrets/a.txt
secrets.yaml secrets.json secret.toml .streamlit/secrets.toml secrets.prod.yaml credentials.toml
credentials aws_credentials credentials.csv new_accessKeys.csv kaggle.json client_secret_1.json
hf_token .hf_token .hf_token.bak~ token config/token.json access_token.json .wandb_api_key
api_key.txt password.txt .netrc~ .git-credentials.bak server.key.bak a.PEM id_rsa .id_rsa.swp
.dockercfg .databrickscfg .modal.toml terraform.tfstate terraform.tfstate.backup terraform.tfvars
.vault-token kubeconfig my-service-account.json application_default_credentials.json
"""
CODE = """
tokenizer.json tokens.py tokens.txt special_tokens_map.json added_tokens.json tokenizer_config.json
tokenizer.model token.py get_token.sh credentials.py secret_santa.py auth.py key.py keyboard.py
keys.txt .env.example .env.local.sample secrets.yaml.template env.yaml env.py environment.yml
secretary.json config.yaml vocab.json requirements.txt .gitignore
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_a_name_of_secrets_is_known(name: str) -> None:
    assert code_files.is_secret(name)


@pytest.mark.parametrize("name", CODE.split())
def test_a_name_of_code_is_not_taken_for_one_of_secrets(name: str) -> None:
    assert not code_files.is_secret(name)


def test_the_spec_that_the_python_client_writes_is_no_code(place: Path) -> None:
    write(place, "train.py", ".holdfast-job-1a2b.yaml")
    assert code_files.pack(place).files == ("train.py",)


def test_what_rayignore_and_excludes_name_is_left_out(place: Path) -> None:
    (place / ".rayignore").write_text("data\n")
    write(place, "train.py", "data/a", "lib/data/b", "lib/big.bin", "kept.bin", "lib/kept.py")
    if (place / ".git").exists():
        git(place, "add", ".")  # also of what git keeps
    found = code_files.choose(place, ("lib/*.bin", "/kept.py", "exp"))
    assert list(found.sizes) == [".rayignore", "kept.bin", "lib/kept.py", "train.py"]


def test_files_that_git_keeps_are_taken_although_ignored_now(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, "kept.py", "gone.py", "sub/a/b.py", ".env")
    git(tmp_path, "add", "-f", ".")
    (tmp_path / ".gitignore").write_text("*.py\na\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "sub" / "a" / "b.py").unlink()
    (tmp_path / "sub" / "a").rmdir()
    write(tmp_path, "sub/a")  # a file where git keeps a directory
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
