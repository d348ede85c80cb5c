"""Commands that run inside the cluster: who typed them, and their output through a Ray job's
log; and what is submitted for a script without a spec."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import pytest

from holdfast.orchestrator.api.v1alpha1 import parse_job
from holdfast.orchestrator.cli import script_job
from holdfast.orchestrator.cli.options import complete
from holdfast.orchestrator.cli.targets.base import Launch
from holdfast.orchestrator.cli.targets.ray import jobs_api
from holdfast.orchestrator.cli.targets.ray.jobs_api import PROGRAM, shell_command, split_output
from holdfast.orchestrator.cli.targets.remote_job import BY, MAX_BY_CHARS, requester
from holdfast.orchestrator.errors import SpecError, UserError

ODD = "ada; $(exit 1) 'x'\x1b[2J\nroot"
BOTH = """
import sys
print("first")
print("a warning\\nand more", file=sys.stderr)
print("second\\n\\nno end", end="")
sys.exit(2)
"""


def run(command: str, *, follows: bool = False) -> subprocess.CompletedProcess[str]:
    """Run it as Ray runs the entrypoint of a job."""
    return subprocess.run(
        shell_command(command, follows=follows), shell=True, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("ada", "ada"),
        ("", ""),  # the user who typed it had no name; the cluster's user is not taken
        ("a\x1b[2Jb\nc\td\u202ee", "a[2Jbcde"),
        ("\udcff", ""),  # bytes that are no text
        ("x" * 1000, "x" * MAX_BY_CHARS),
    ],
)
def test_the_name_of_the_user_is_short_and_printable(
    given: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BY, given)
    assert requester() == kept


@pytest.mark.parametrize("follows", [True, False])
def test_the_name_of_the_user_passes_through_the_shell(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BY, raising=False)
    monkeypatch.setenv("LOGNAME", ODD)
    done = run(shlex.join(["printenv", BY]), follows=follows)
    assert split_output(done.stdout)[0] == "ada; $(exit 1) 'x'[2Jroot\n"


def test_stdout_stderr_and_exit_code_come_back() -> None:
    done = run(shlex.join([sys.executable, "-c", BOTH]))
    assert done.returncode == 2
    assert split_output(done.stdout) == ("first\nsecond\n\nno end", "a warning\nand more\n")


def test_a_command_that_follows_mixes_both_streams() -> None:
    done = run(shlex.join([sys.executable, "-c", BOTH]), follows=True)
    assert done.returncode == 2
    assert "a warning\nand more\n" in done.stdout and "second" in done.stdout


def test_the_output_of_a_killed_command_is_stdout() -> None:
    assert split_output("half a li") == ("half a li", "")


class FakeApi:
    """The Jobs API of a cluster: it keeps what is submitted."""

    submitted: ClassVar[list[tuple[str, dict[str, Any], dict[str, str]]]] = []
    files: ClassVar[dict[str, bytes]] = {}

    def __init__(self, address: str) -> None:
        assert address == "auto"

    def running(self, _owner: str, _name: str) -> None:
        return None

    def submit(
        self, name: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> str:
        """Read like Ray's client: the archive is read before the call returns."""
        self.submitted.append((entrypoint, runtime_env, metadata))
        if str(runtime_env["working_dir"]).endswith(".zip"):
            with ZipFile(runtime_env["working_dir"]) as archive:
                self.files.update({name: archive.read(name) for name in archive.namelist()})
        return name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, and a cluster that keeps what is submitted."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs_api.jobs_api, "JobsApi", FakeApi)
    monkeypatch.setattr(FakeApi, "submitted", [])
    monkeypatch.setattr(FakeApi, "files", {})
    return tmp_path


def submit(run: script_job.ScriptRun | None, env: Path | None = None) -> jobs_api.Submitted:
    assert run is not None
    with script_job.spec_file(run, None, lambda name: f"{name}-1", print) as (file, show):
        return jobs_api.submit(Launch(file, Path.cwd(), run, env, show), "auto", print)


def test_a_script_without_a_spec_is_uploaded_with_the_spec_that_is_made(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / ".env").write_text("HF_TOKEN=abc")
    file = Path("train.py")
    run = script_job.asked(file, ["--lr", "1 2"], nodes=2, env=["A=b c", "HF_TOKEN=def"])
    done = submit(run)
    ((entrypoint, runtime_env, metadata),) = FakeApi.submitted
    words = shlex.split(entrypoint.removeprefix(f"{PROGRAM} "))
    assert words == ["run", f".holdfast-job-{done.job}.yaml", "--ray", "auto"]
    assert FakeApi.files.keys() == {words[1], "train.py"}
    job = parse_job(FakeApi.files[words[1]].decode())
    assert job.name == done.job and job.spec.env == {"A": "b c", "HF_TOKEN": "def"}
    assert job.spec.nodes.max == 2 and job.spec.entrypoint.args == ("--lr", "1 2")
    shown = capsys.readouterr()
    assert "HF_TOKEN: (hidden)" in shown.out and "A: b c" in shown.out
    assert ".env" in shown.err and "not uploaded" in shown.err
    assert not [text for text in (entrypoint, str(runtime_env), str(metadata)) if "def" in text]
    (here / "train.py").write_text("def f(:")
    with pytest.raises(SpecError, match=r"got train\.py \(line 1: "):
        submit(run)


def test_in_a_working_dir_of_the_users_own_the_spec_is_made_of_the_same_options(here: Path) -> None:
    env, file = here / "env.yaml", Path("train.py")
    env.write_text(f"working_dir: {here}\n")
    run = script_job.asked(file, ["--lr", "1 2"], nodes=2)
    done = submit(run, env)
    ((entrypoint, runtime_env, _metadata),) = FakeApi.submitted
    assert runtime_env == {"working_dir": str(here)}
    words = shlex.split(entrypoint.removeprefix(f"{PROGRAM} "))
    assert words == ["run", "--nodes=2", f"--name={done.job}", "--ray", "auto",
                     "--", "train.py", "--lr", "1 2"]  # fmt: skip
    assert complete(words) == words
    run = script_job.asked(file, [], env=["A=1"])
    with pytest.raises(UserError, match="--env: got A with a working_dir in --runtime-env"):
        submit(run, env)


def test_what_a_runtime_env_excludes_is_not_uploaded(here: Path) -> None:
    spec, env = here / "job.yaml", here / "env.yaml"
    spec.write_text(
        "apiVersion: holdfast.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: demo}\n"
        "spec: {entrypoint: {script: train.py}}\n"
    )
    (here / "big.bin").touch()
    (here / ".gitignore").write_text("*.yaml\n")  # the spec goes along all the same
    env.write_text("excludes: ['*.bin']\n")
    jobs_api.submit(Launch(spec, here, None, env), "auto", print)
    assert FakeApi.files.keys() == {"job.yaml", "train.py", ".gitignore"}
    env.write_text("excludes: all\n")
    with pytest.raises(UserError, match="got excludes: all; expected a list"):
        jobs_api.submit(Launch(spec, here, None, env), "auto", print)
    (here / ".gitignore").write_text("train.py\n")
    with pytest.raises(UserError, match=r"got train\.py, which is not uploaded"):
        jobs_api.submit(Launch(spec, here, None, None), "auto", print)
