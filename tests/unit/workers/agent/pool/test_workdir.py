"""The working directory of a worker on a node without the directory of the spec."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.pool.worker_main import enter_directory
from holdfast.workers.session.core import working_directory
from tests.documents import job_document

from .test_worker_pool import ASSIGN

RECIPE = {"recipe": {"name": "pretrain"}}


def job(entrypoint: dict[str, Any], **spec: Any) -> TrainingJob:
    return job_from_mapping(job_document("job", {"entrypoint": entrypoint, **spec}))


@pytest.fixture
def assign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> worker_protocol.Assign:
    """The assignment of a spec in another directory; the current directory is restored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    where = {"spec_directory": str(tmp_path / "elsewhere"), "log_file": f"{tmp_path}/logs/rank.log"}
    return msgspec.structs.replace(ASSIGN, **where)


def test_the_directory_of_the_spec_is_entered_if_it_exists(
    assign: worker_protocol.Assign, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere" / "src").mkdir(parents=True)
    assert enter_directory(assign, job(RECIPE)) is None
    assert Path.cwd() == tmp_path / "elsewhere"
    assert enter_directory(assign, job(RECIPE, workingDirectory="src")) is None
    assert Path.cwd() == tmp_path / "elsewhere" / "src"


def test_a_recipe_without_that_directory_runs_beside_its_logs(
    assign: worker_protocol.Assign, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = job(RECIPE)
    assert enter_directory(assign, recipe) is None
    assert Path.cwd() == tmp_path / "logs"
    assert str(tmp_path / "elsewhere") in capsys.readouterr().err
    ours, _ = worker_transport.pair()
    directory = working_directory(worker_transport.Attached(link=ours, assign=assign, job=recipe))
    assert directory == str(tmp_path / "elsewhere"), "its data is not looked for beside the logs"


def test_a_working_directory_of_the_spec_is_never_replaced(assign: worker_protocol.Assign) -> None:
    problem = enter_directory(assign, job(RECIPE, workingDirectory="src"))
    assert problem is not None and problem.field == "spec.workingDirectory"
    assert f"src ({assign.spec_directory}/src: No such file or directory" in problem.got


@pytest.mark.parametrize("there", [False, True], ids=["no directory", "no script in it"])
def test_a_missing_script_is_named_with_the_missing_path(
    assign: worker_protocol.Assign, tmp_path: Path, there: bool
) -> None:
    if there:
        (tmp_path / "elsewhere").mkdir()
    problem = enter_directory(assign, job({"script": "train.py"}))
    assert problem is not None and problem.field == "spec.entrypoint.script"
    missing = f"{assign.spec_directory}/train.py" if there else assign.spec_directory
    assert f"train.py ({missing}: No such file" in problem.got
    assert "holdfast submit" in problem.fix


def test_a_path_may_begin_with_the_home_of_the_user(
    assign: worker_protocol.Assign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before a job starts resolves it in the same way."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "src").mkdir()
    (tmp_path / "train.py").touch()
    at_home = job({"script": "~/train.py"}, workingDirectory="~/src")
    assert enter_directory(assign, at_home) is None
    assert Path.cwd() == tmp_path / "src"
    with socket.socket() as link:
        attached = worker_transport.Attached(link, assign, at_home)
        assert working_directory(attached) == str(tmp_path / "src")


@pytest.mark.parametrize(
    ("field", "entrypoint", "spec"),
    [
        ("spec.workingDirectory", RECIPE, {"workingDirectory": "~no-such-user/x"}),
        ("spec.entrypoint.script", {"script": "~no-such-user/x"}, {}),
    ],
)
def test_an_unknown_home_is_a_problem_and_not_a_traceback(
    field: str,
    entrypoint: dict[str, Any],
    spec: dict[str, Any],
    assign: worker_protocol.Assign,
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    problem = enter_directory(assign, job(entrypoint, **spec))
    assert problem is not None and problem.field == field
    assert "~no-such-user/x: no home is known here for its ~ on this node" in problem.got
