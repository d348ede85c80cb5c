"""Commands that run inside the cluster: who typed them, and their output through a Ray job's
log; and what is submitted for a script without a spec."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from holdfast.orchestrator.cli import script_job
from holdfast.orchestrator.cli.options import complete
from holdfast.orchestrator.cli.targets.ray import jobs_api
from holdfast.orchestrator.cli.targets.ray.jobs_api import (
    BY,
    MAX_BY_CHARS,
    PROGRAM,
    requester,
    shell_command,
    split_output,
)
from holdfast.orchestrator.errors import SpecError

ODD = "ada; $(exit 1) 'x'\x1b[2J\nroot"
BOTH = """
import sys
print("first")
print("a warning\\nand more", file=sys.stderr)
print("second\\n\\nno end", end="")
sys.exit(2)
"""


def run(command: str, *, follows: bool = False) -> subprocess.CompletedProcess[str]:
    """As Ray runs the entrypoint of a job."""
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

    submitted: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, address: str) -> None:
        assert address == "auto"

    def running(self, _owner: str, _name: str) -> None:
        return None

    def submit(
        self, name: str, entrypoint: str, runtime_env: dict[str, Any], _metadata: dict[str, str]
    ) -> str:
        self.submitted.append((entrypoint, runtime_env))
        return name


def test_a_script_without_a_spec_is_run_with_the_same_options_in_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs_api.jobs_api, "JobsApi", FakeApi)
    file = Path("train.py")
    run = script_job.asked(file, ["--lr", "1 2"], nodes=2, env=["A=b c"])
    done = jobs_api.submit(file, "auto", None, attach=False, without_spec=run)
    ((entrypoint, runtime_env),) = FakeApi.submitted
    assert runtime_env == {"working_dir": str(tmp_path)}
    words = shlex.split(entrypoint.removeprefix(f"{PROGRAM} "))
    assert words == ["run", "--nodes=2", f"--name={done.job}", "--env=A=b c", "--ray", "auto",
                     "--", "train.py", "--lr", "1 2"]  # fmt: skip
    assert complete(words) == words
    (tmp_path / "train.py").write_text("def f(:")
    with pytest.raises(SpecError, match=r"got train\.py \(line 1: "):
        jobs_api.submit(file, "auto", None, attach=False, without_spec=run)
