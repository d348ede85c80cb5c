"""Arguments of the client that are refused before anything starts, and what its commands do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Client, JobHandle
from holdfast.orchestrator.client import commands
from holdfast.orchestrator.client.access import LocalAccess
from holdfast.orchestrator.errors import HoldfastError, SpecError, UserError
from holdfast.orchestrator.runtime.job_directory import Home
from tests.documents import job_document
from tests.unit.cli.test_finished_jobs import ended_job

SPEC = job_document("demo", {"entrypoint": {"script": "train.py"}})


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"ray": "auto", "kubernetes": True}, "ray: got ray and kubernetes"),
        ({"namespace": "team"}, "namespace: got team without kubernetes"),
        ({"kubeconfig": "k", "ray": "auto"}, "kubeconfig: got k without kubernetes"),
    ],
)
def test_targets_that_exclude_each_other_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Client(**given)


@pytest.mark.parametrize(
    ("job", "given", "what"),
    [
        (SPEC, {"nodes": 2}, "nodes: got it with a spec; expected it with a script or a function"),
        (SPEC, {"args": [1]}, "args: got it with a spec"),
        ("train.py", {"kwargs": {"a": 1}}, "kwargs: got it with train.py"),
        ("missing.yaml", {}, "missing.yaml: cannot be read"),
        ({"kind": "TrainingJob"}, {}, "apiVersion: got nothing"),
        ("train.py", {"workers": 0}, "spec.workersPerNode: got 0; expected greater than or equal"),
        ("train.py", {"nodes": 0}, "spec.nodes.max: got 0; expected greater than or equal to 1"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_a_process_starts(
    job: Any, given: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=what):
        Client(home=tmp_path).submit(job, **given)
    assert not list(tmp_path.iterdir())


def test_a_wrong_spec_has_its_problems_as_objects(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        Client(home=tmp_path).submit({**SPEC, "spec": {"entrypoint": {}}})
    assert refused.value.problems[0].field == "spec.entrypoint"


def test_a_handle_shows_a_job_that_cannot_be_read_as_text(tmp_path: Path) -> None:
    job = JobHandle(LocalAccess(Home(tmp_path)), "gone")
    assert repr(job) == "<job gone on this machine>"
    assert "got gone; expected a job" in job._repr_html_()


def test_a_job_that_does_not_exist_is_named(tmp_path: Path) -> None:
    client = Client(home=tmp_path)
    assert client.jobs() == []
    with pytest.raises(UserError, match="job: got gone; expected a job"):
        client.job("gone")


def test_the_text_of_a_command_that_failed_becomes_the_error() -> None:
    text = "a note\nerror: 1 problem in the job spec\n  spec.nodes: got 0\n"
    found = HoldfastError.of_command(2, text)
    assert type(found) is UserError
    assert str(found) == "1 problem in the job spec\n  spec.nodes: got 0"
    found = HoldfastError.of_command(-9, "Killed\n")
    assert type(found) is HoldfastError and str(found) == "the command ended with code -9: Killed"


def test_workers_do_not_inherit_how_a_notebook_shows_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert not {"FORCE_COLOR", "MPLBACKEND"} & commands.environment().keys()
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert commands.environment()["MPLBACKEND"] == "agg"


def test_commands_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    run = commands.Commands(["--home", str(tmp_path)])
    assert run.run("status", "--json") == "[]\n"
    with pytest.raises(UserError, match="job: got gone"):
        list(run.lines("logs", "gone", "--follow"))


def test_changes_of_a_job_that_has_ended_are_rejected_with_its_end(tmp_path: Path) -> None:
    ended_job(tmp_path, "done")
    with pytest.raises(UserError, match=r"^job done: was cancelled \(.*\); nothing to suspend$"):
        Client(home=tmp_path).job("done").suspend()
