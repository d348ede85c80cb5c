"""Jobs whose code is uploaded, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.cli import job_code
from holdfast.orchestrator.errors import SpecError, UserError
from tests.unit.api.wrong_jobs import job as document
from tests.unit.api.wrong_jobs import recipe


def job(entrypoint: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    found = entrypoint or {"script": "train.py"}
    return job_from_mapping(document({"entrypoint": found, **spec}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    for name in ("train.py", "src/main.py", "src/pkg/__init__.py", "run.sh"):
        (tmp_path / name).write_text("print()\n")
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(job(), id="script"),
        pytest.param(job({"script": "main.py"}, workingDirectory="src"), id="below"),
        pytest.param(job({"module": "pkg.train"}, workingDirectory="src"), id="module"),
        pytest.param(job({"command": "torchrun train.py"}), id="launcher"),
        pytest.param(job({"command": "bash run.sh"}), id="program"),
    ],
)
def test_the_directory_of_the_spec_is_packed(place: Path, given: TrainingJob) -> None:
    found, code = job_code.with_code(given, place, "job.yaml")
    assert code is not None and "src/main.py" in code.files
    assert found.spec.code == code.name
    assert "uploaded: 4 files" in job_code.notes(found, code)[0]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(job({"script": "other.py"}), id="of-the-image"),
        pytest.param(job(workingDirectory="/workspace"), id="absolute"),
        pytest.param(job({"module": "json.tool"}), id="installed"),
        pytest.param(job({"command": "bash -c true"}), id="program"),
        pytest.param(job_from_mapping(document(recipe())), id="recipe"),
        pytest.param(job(code="a" * 64), id="uploaded-before"),
    ],
)
def test_without_code_here_nothing_is_uploaded(place: Path, given: TrainingJob) -> None:
    found, code = job_code.with_code(given, place, "job.yaml")
    assert code is None and found == given
    notes = job_code.notes(found, code)
    quiet = given.spec.entrypoint.recipe is not None or given.spec.code is not None
    assert notes == [] if quiet else "what its image has" in notes[0]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(job({"script": "src/../train.py"}), id="script"),
        pytest.param(job(workingDirectory="src/.."), id="working-directory"),
        pytest.param(job({"script": "../train.py"}, workingDirectory="src"), id="up"),
        pytest.param(job({"script": "linked/main.py"}), id="linked-directory"),
        pytest.param(job({"script": "linked.py"}), id="linked-script"),
    ],
)
def test_a_script_is_found_among_the_uploaded_files_by_any_path(
    place: Path, given: TrainingJob
) -> None:
    (place / "linked").symlink_to("src")
    (place / "linked.py").symlink_to("train.py")
    _found, code = job_code.with_code(given, place, "job.yaml")
    assert code is not None and "train.py" in code.files


def test_a_script_that_does_not_compile_or_is_ignored_is_refused(place: Path) -> None:
    (place / ".gitignore").write_text("train.py\n")
    with pytest.raises(UserError, match=r"train\.py, which is not uploaded"):
        job_code.with_code(job(), place, "job.yaml")
    (place / ".gitignore").unlink()
    (place / "train.py").write_text("def\n")
    with pytest.raises(SpecError, match=r"line 1"):
        job_code.with_code(job(), place, "job.yaml")


def test_edited_code_has_to_be_edited_and_to_be_the_jobs(place: Path) -> None:
    running, _code = job_code.with_code(job(), place, "job.yaml")
    with pytest.raises(UserError, match="runs already"):
        job_code.edited(running, place)
    with pytest.raises(UserError, match=r"which runs train\.py, from .*src"):
        job_code.edited(running, place / "src")
    (place / "src" / "main.py").write_text("print(2)\n")
    assert job_code.edited(running, place).name != running.spec.code
