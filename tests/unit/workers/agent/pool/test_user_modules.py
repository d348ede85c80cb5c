"""spec.preload: what is imported before a fork, what is not, and what a worker refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.errors import UserError
from holdfast.workers.agent.pool import user_modules

QUIET = "import os\nPID = os.getpid()\nVALUE = os.environ.get('TUNED', '')\n"
THREADED = (
    "import os, threading\nPID = os.getpid()\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
BROKEN = "raise SystemExit('no licence')\n"


def job(*modules: str, **spec: object) -> TrainingJob:
    return job_from_mapping(document(*modules, **spec))


def document(*modules: str, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "j"},
        "spec": {"entrypoint": {"script": "train.py"}, "preload": list(modules), **spec},
    }


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for name, text in {"quiet": QUIET, "threaded": THREADED, "broken": BROKEN}.items():
        (tmp_path / f"holdfast_test_{name}.py").write_text(text)
    return tmp_path


def run(program: str, modules: Path) -> object:
    """What a fresh interpreter prints last, as JSON."""
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def program(*names: str) -> str:
    return f"""
import json, sys
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.workers.agent.pool import user_modules
job = job_from_mapping({document(*names, env={"TUNED": "yes"})!r})
problem = user_modules.import_before_fork(job)
quiet = sys.modules.get("holdfast_test_quiet")
print(json.dumps([problem, quiet and quiet.VALUE]))
"""


def test_modules_are_imported_with_the_variables_of_the_job(modules: Path) -> None:
    assert run(program("holdfast_test_quiet"), modules) == ["", "yes"]


def test_a_module_that_starts_a_thread_makes_the_process_unable_to_fork(modules: Path) -> None:
    got = run(program("holdfast_test_threaded", "holdfast_test_quiet"), modules)
    assert got == ["the import of holdfast_test_threaded started 1 threads", None]


def test_a_module_that_cannot_be_imported_is_left_to_the_worker(modules: Path) -> None:
    got = run(program("holdfast_test_broken", "no_such", "holdfast_test_quiet"), modules)
    assert got == ["", "yes"]


def test_the_worker_names_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(UserError) as refused:
        user_modules.expect_imported(job("json", "no_such_module"))
    assert str(refused.value) == (
        "spec.preload.1: got no_such_module (ModuleNotFoundError: No module named "
        "'no_such_module'); expected a module that can be imported on every node; install it "
        "there, or remove it from the list"
    )
