"""A part can be removed: without its files the rest imports, shows its help and passes its tests.
parts.py names what the parts provide, the import contracts which files they are."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.documents import job_document

ROOT = Path(__file__).parents[2]
HOOKS, UNITS = "workers/integrations", "tests/unit"
NAMES = ("transformers", "lightning", "deepspeed", "torchtitan")
RAY_TRAIN = [f"{HOOKS}/ray_train.py", "orchestrator/client/ray_trainer.py", "holdfast/ray.py"]
FRAMEWORKS = {name: [f"{HOOKS}/*{name}*.py", f"holdfast/{name}.py"] for name in NAMES}
FRAMEWORKS["ray train"] = RAY_TRAIN
"""Framework -> files of its integration, and those that are declared to need it."""
TESTS = {
    "explorer": [
        "workers/training/test_calibrate.py", "cli/test_written_specs.py",
        "cli/test_printed_commands.py",
    ],
    **{part: ["cli/test_printed_commands.py"] for part in ("preflight", "page", "Kubernetes")},
    "transformers": [
        f"{HOOKS}/test_counted_steps.py", f"{HOOKS}/test_resumed_trainers.py",
        "workers/agent/pool/test_framework_hooks.py",
    ],
    "lightning": [f"{HOOKS}/test_resumed_trainers.py"],
    "deepspeed": ["workers/agent/pool/test_framework_hooks.py"],
    "client": ["cli/test_written_specs.py", f"{HOOKS}/test_ray_train.py"],
    "local": ["cli", f"{HOOKS}/test_ray_train.py"],  # commands are tested on jobs of this machine
    "integrations": ["workers/agent/pool/test_framework_hooks.py", "client/test_ray_trainer.py"],
    "Ray": ["backends/kubernetes/test_kuberay.py", f"{HOOKS}/test_ray_train.py"],
}  # fmt: skip
"""Part -> files of unit tests that need it, and are not beside those of the part itself."""


def removable() -> dict[str, list[str]]:
    """Part -> its files, and those that may import it: what the import contracts say."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    found = [one for one in settings["contracts"] if one["type"] == "protected"]
    owners = [(one["protected_modules"], set(one["allowed_importers"])) for one in found]
    parts = {}
    for one in found:
        name = re.sub("^the | (backend|is|are) .*", "", one["name"])
        modules = {*one["protected_modules"], *one["allowed_importers"]}
        for protected, importers in owners:
            if any(f"{m}.".startswith(f"{top}.") for m in modules for top in protected):
                modules |= importers
        paths = [ROOT / module.replace(".", "/") for module in sorted(modules - {"holdfast"})]
        files = [path if path.is_dir() else path.with_suffix(".py") for path in paths]
        parts[name] = [
            str(file.relative_to(ROOT)).replace("holdfast/orchestrator", "orchestrator")
            .replace("holdfast/workers", "workers") for file in files
        ]  # fmt: skip
    return parts


PARTS = {**removable(), **FRAMEWORKS}
NEAR = ["api", "cli", "journal", "planner", "runtime/observe"]
NEAR_WORKERS = ["workers/agent/pool", "workers/checkpoint", "workers/integrations"]
"""Unit tests of what asks for a part, of the control plane or of workers."""
IMPORT = """
import importlib, pathlib
for file in [*pathlib.Path("orchestrator").rglob("*.py"), *pathlib.Path("workers").rglob("*.py")]:
    try:
        importlib.import_module(".".join(["holdfast", *file.with_suffix("").parts]))
    except ModuleNotFoundError as error:
        assert not error.name.startswith("holdfast"), f"{file}: {error}"
"""
HELP = """
from holdfast.orchestrator.cli.main import app
for words in (["--help"], ["run", "--help"], ["spec", "--help"]):
    app(words, prog_name="holdfast", standalone_mode=False)
"""
COMMAND = {"preflight": "│ preflight", "explorer": "│ plan", "page": "│ ui"}


def removed(part: str, place: Path) -> list[Path]:
    """Files and folders of a part and of its unit tests, which mirror them."""
    paths = [UNITS / Path(file.removeprefix("orchestrator/")) for file in PARTS[part]]
    tests = [path.with_name(f"test_{path.name}") if path.suffix else path for path in paths]
    tests += [Path(UNITS, test) for test in TESTS.get(part, ())]
    return [path for file in [*PARTS[part], *map(str, tests)] for path in place.glob(file)]


def without(part: str, place: Path) -> Path:
    """A copy of the tree without a part."""
    for path in ROOT.iterdir():
        if path.name in ("orchestrator", "workers", "holdfast", "tests"):
            shutil.copytree(path, place / path.name, symlinks=True)
        elif not path.name.startswith("."):
            (place / path.name).symlink_to(path)
    for path in removed(part, place):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return place


def run(place: Path, *words: str | Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_the_rest_works_without_a_part(tmp_path: Path, part: str) -> None:
    place = without(part, tmp_path)
    run(place, "-c", IMPORT)
    shown = run(place, "-c", HELP)
    for owner, command in COMMAND.items():
        assert (f"{command} " in shown) == (part != owner)
    near = NEAR_WORKERS if any(file.startswith("workers") for file in PARTS[part]) else NEAR
    folders = [f"{UNITS}/{folder}" for folder in near if (place / UNITS / folder).exists()]
    run(place, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *folders)


def test_a_recipe_that_is_not_installed_is_rejected_before_a_job(tmp_path: Path) -> None:
    place = without("recipe", tmp_path)
    spec = {"entrypoint": {"recipe": {"name": "pretrain"}}}
    (place / "job.yaml").write_text(json.dumps(job_document("demo", spec)))
    command = "import sys; from holdfast.orchestrator.cli.main import main; sys.exit(main())"
    for words in (["spec", "validate"], ["run", "--home", "home"], ["submit", "--home", "home"]):
        done = run(place, "-c", command, *words, "job.yaml", code=2)
        assert "name: got pretrain, without its holdfast.workers.training.recipes.pretrain" in done
        assert "pip install '.[train]'" in done
    assert not [*place.glob("home/jobs/*")]


@functools.cache
def imports(file: Path) -> set[str]:
    """Modules, and names in modules, that a file imports outside of functions."""
    package, names = file.relative_to(ROOT).parts[:-1], set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("part", PARTS)
def test_no_unit_test_of_the_rest_imports_a_part(part: str) -> None:
    gone = removed(part, ROOT)
    paths = [path.relative_to(ROOT).with_suffix("") for path in gone]
    modules = [".".join(path.parts) for path in [*paths, *(Path("holdfast") / p for p in paths)]]
    for file in (ROOT / UNITS).rglob("*.py"):
        if not any(file.is_relative_to(path) for path in gone):
            names = imports(file)
            wrong = [n for n in names if any(f"{n}.".startswith(f"{m}.") for m in modules)]
            assert not wrong, f"{file.relative_to(ROOT)} belongs to the tests of {part}: {wrong}"
