"""A part can be removed: without its files the rest imports and shows its help. parts.py names what
the parts provide."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import job_document

ROOT = Path(__file__).parents[2]
CLI, COMMANDS = "orchestrator/cli", "orchestrator/cli/commands"
HOOKS = "workers/integrations"
PARTS = {
    "preflight": ("orchestrator/preflight", f"{COMMANDS}/preflight.py"),
    "explorer": (
        "orchestrator/explorer", "orchestrator/catalogue",
        "orchestrator/runtime/observe/planned.py",
        f"{COMMANDS}/plan.py", f"{CLI}/plan_text.py", f"{CLI}/calibration.py",
    ),
    "training": ("workers/training", "workers/agent/pool/warmup.py"),
    "transformers": (f"{HOOKS}/transformers*.py", f"{HOOKS}/resumed_transformers.py"),
    "lightning": (f"{HOOKS}/lightning*.py", f"{HOOKS}/resumed_lightning.py"),
    "deepspeed": (f"{HOOKS}/deepspeed.py", f"{HOOKS}/resumed_deepspeed.py"),
    "torchtitan": (f"{HOOKS}/torchtitan.py", "holdfast/torchtitan.py"),
    "ray train": (f"{HOOKS}/ray_train.py", "orchestrator/client/ray_trainer.py", "holdfast/ray.py"),
    "ui": ("orchestrator/ui",),
    "client": ("orchestrator/client", "holdfast/ray.py"),
    "local": (
        "orchestrator/backends/local", "orchestrator/hosts/local", f"{CLI}/targets/local.py",
        "orchestrator/client", "holdfast/ray.py",
    ),
    "kubernetes": (
        "orchestrator/backends/kubernetes", "orchestrator/hosts/kubernetes", "orchestrator/kube",
        "orchestrator/journal/configmap_store.py", f"{CLI}/targets/kubernetes",
        f"{COMMANDS}/operator.py",
    ),
    "ray": (
        "orchestrator/backends/ray", "orchestrator/hosts/ray", f"{CLI}/targets/ray",
        "orchestrator/journal/gcs_store.py", "orchestrator/client/ray_trainer.py",
        "holdfast/ray.py",
    ),
}  # fmt: skip
"""Part -> its files, and those that are declared to need it."""

IMPORT = """
import importlib, os, sys
def load(place):
    sys.path.insert(0, place)
    for name in open(f"{place}/modules").read().split():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.startswith("holdfast"):
                sys.exit(f"{place}: {name}: {error}")
load(sys.argv[1])  # with the libraries, once for all
for place in sys.argv[1:]:
    if os.fork() == 0:
        for name in [name for name in sys.modules if name.startswith("holdfast")]:
            del sys.modules[name]
        load(place)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""
HELP = """
from holdfast.orchestrator.cli.main import app
for words in (["--help"], ["run", "--help"], ["spec", "--help"]):
    app(words, prog_name="holdfast", standalone_mode=False)
"""
COMMAND = {"preflight": "│ preflight", "explorer": "│ plan", "ui": "│ ui"}


def modules(place: Path, *tops: str) -> dict[str, Path]:
    files = [file for top in tops for file in (place / top).rglob("*.py")]
    names = {file: file.relative_to(place).with_suffix("").parts for file in files}
    return {".".join(parts): file for file, parts in names.items() if parts[-1] != "__main__"}


def without(part: str, place: Path) -> Path:
    """A copy of the tree without a part, and with a list of the modules that are left."""
    for top in ("orchestrator", "workers", "holdfast"):
        shutil.copytree(ROOT / top, place / top, symlinks=True)
    for path in [path for pattern in PARTS[part] for path in place.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    names = sorted(f"holdfast.{name}" for name in modules(place, "orchestrator", "workers"))
    (place / "modules").write_text("\n".join(names))
    return place


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Part -> a tree without it."""
    return {part: without(part, tmp_path_factory.mktemp("part")) for part in PARTS}


def run(place: Path, *words: str | Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_the_rest_imports_without_a_part(copies: dict[str, Path]) -> None:
    run(ROOT, "-c", IMPORT, *copies.values())


@pytest.mark.parametrize("part", PARTS)
def test_the_command_shows_its_help_without_a_part(copies: dict[str, Path], part: str) -> None:
    shown = run(copies[part], "-c", HELP)
    for owner, command in COMMAND.items():
        assert (f"{command} " in shown) == (part != owner)


def test_a_recipe_that_is_not_installed_is_rejected_before_a_job(copies: dict[str, Path]) -> None:
    place = copies["training"]
    spec = {"entrypoint": {"recipe": {"name": "pretrain"}}}
    (place / "job.yaml").write_text(json.dumps(job_document("demo", spec)))
    command = "import sys; from holdfast.orchestrator.cli.main import main; sys.exit(main())"
    for words in (["spec", "validate"], ["run", "--home", "home"], ["submit", "--home", "home"]):
        done = run(place, "-c", command, *words, "job.yaml", code=2)
        assert "name: got pretrain, without its holdfast.workers.training.recipes.pretrain" in done
        assert "pip install '.[train]'" in done
    assert not [*place.glob("home/jobs/*")]


@pytest.mark.timeout(1800)
def test_a_launch_is_decided_and_shown_without_the_explorer(tmp_path: Path) -> None:
    """Unit tests of the packages that ask for it, except tests that import it."""
    place = without("explorer", tmp_path)
    shutil.copytree(ROOT / "tests", place / "tests")
    for name in ("pyproject.toml", "tools", "docs", "examples"):
        (place / name).symlink_to(ROOT / name)
    packages = [f"tests/unit/{name}" for name in ("core", "planner", "runtime/observe")]
    needs = re.compile(r"orchestrator\.(explorer|catalogue)\b")
    files = [file for room in packages for file in (place / room).rglob("test_*.py")]
    rest = [file for file in files if not needs.search(file.read_text())]
    run(place, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *rest)
