"""The warm-up of a standby: for which entrypoints, and that it leaves no state behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.pool.warmup import calls_session, likely_mesh
from tests.documents import job_document

ROOT = Path(__file__).parents[5]


def job(entrypoint: dict[str, Any], **spec: Any) -> TrainingJob:
    return job_from_mapping(
        job_document(
            "job",
            {"nodes": {"min": 2, "max": 2}, "workersPerNode": 2, "entrypoint": entrypoint, **spec},
        )
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from holdfast import session", True),
        ("from holdfast import TrainingJob, session as s", True),
        ("import holdfast.session", True),
        ("import holdfast.session as core", True),
        ("from holdfast.session import init", True),
        ("def main():\n    from holdfast import session\n", True),
        ("import torch\nimport torch.distributed as dist", False),
        ("from holdfast.workers.training.data import share", False),
        ("from . import session", False),
        ("import session", False),
        ("# from holdfast import session", False),
        ("import holdfast.sessions", False),
        ("this is no python", False),
        ("\0", False),
    ],
)
def test_a_script_calls_the_session_when_its_own_file_imports_it(
    text: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(text)
    script = job({"script": "train.py"}, workingDirectory="src")
    module = job({"module": "src.train"})
    assert calls_session(script, str(tmp_path)) is expected
    assert calls_session(module, str(tmp_path)) is expected


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ({}, Mesh(shard=4)),
        ({"shard": 2}, Mesh(replicate=2, shard=2)),
        ({"replicate": 2, "context": 2}, Mesh(replicate=2, context=2)),
        ({"tensor": 2, "context": 2}, Mesh(tensor=2, context=2)),
        ({"shard": "world", "context": 2}, Mesh(shard=2, context=2)),
        ({"pipeline": {"ranks": 2}, "tensor": 2}, Mesh(tensor=2)),  # of one stage
        ({"pipeline": {"ranks": 2}}, Mesh(shard=2)),
    ],
)
def test_the_warm_up_has_the_mesh_of_the_job_at_full_size(
    parallelism: dict[str, Any], expected: Mesh
) -> None:
    assert likely_mesh(job({"recipe": {"name": "pretrain"}}, parallelism=parallelism)) == expected


def test_a_missing_script_does_not_call_the_session(tmp_path: Path) -> None:
    assert not calls_session(job({"script": "missing.py"}), str(tmp_path))


def test_a_script_in_the_users_home_calls_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("import holdfast.session")
    assert calls_session(job({"script": "~/train.py"}), "/nowhere")


INNER_AXES = {"parallelism": {"tensor": 2, "context": 2}}
STAGES = {"parallelism": {"pipeline": {"ranks": 2, "schedule": "zbvZeroBubble"}}}

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from tests.unit.workers.agent.pool.test_warmup import job
from holdfast.workers.agent.pool import warmup

torch.manual_seed(11)
threads, expected = torch.get_num_threads(), torch.rand(3)
torch.manual_seed(11)
built = []
make = warmup.{counted}
warmup.{counted} = lambda *given: built.append(given) or make(*given)
warmup.warm(job({entrypoint!r}, **{spec!r}), {directory!r})
print("warm-ups", len(built))
assert not dist.is_initialized()
assert torch.equal(torch.rand(3), expected), "the random state has changed"
assert torch.get_num_threads() == threads
torch.set_num_interop_threads(2)  # raises when the pool has started
"""


@pytest.mark.parametrize(
    ("entrypoint", "spec", "counted", "warm_ups"),
    [
        ({"recipe": {"name": "pretrain"}}, {}, "_warm_recipe", 1),
        ({"recipe": {"name": "pretrain"}}, INNER_AXES, "_warm_recipe", 1),
        ({"recipe": {"name": "pretrain"}}, STAGES, "_warm_recipe", 1),
        ({"script": "examples/session_loop.py"}, {}, "_warm_loop", 1),
        ({"script": "tests/unit/workers/training/test_samples.py"}, {}, "_warm_loop", 0),
    ],
)
def test_a_warm_up_leaves_no_group_no_random_state_and_no_threads_behind(
    entrypoint: dict[str, Any], spec: dict[str, Any], counted: str, warm_ups: int
) -> None:
    program = PROGRAM.format(entrypoint=entrypoint, spec=spec, counted=counted, directory=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"warm-ups {warm_ups}"]
    assert "Traceback" not in done.stderr, done.stderr
