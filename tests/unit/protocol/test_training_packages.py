"""Packages of a node, and the message for a person without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import training_packages

ROOT = Path(__file__).parents[3]


def packages(directory: Path, torch: str | None, *parts: str, asks: str = "'torch'") -> str:
    """The problem in a Python that has only these packages."""
    for name in parts:
        (directory / f"{name}.py").touch()
    if torch is not None:
        (directory / "torch").mkdir()
        (directory / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
        (directory / "torch" / "version.py").write_text(torch)
    file = training_packages.__file__
    program = (
        f"import runpy, sys; sys.path += [{str(directory)!r}, {str(ROOT)!r}]; "
        f"print(runpy.run_path({file!r})['problem']({asks}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=directory, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_missing_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    text = packages(tmp_path, None, "numpy", "psutil")
    assert "missing: torch, safetensors, xxhash;" in text
    assert text.endswith("pip install torch, and pip install '.[train]' in a checkout of Holdfast")
    text = packages(tmp_path, "__version__ = '2.6.0'\n")
    assert "missing: safetensors, xxhash;" in text and "; torch: got 2.6.0; expected" in text


def test_a_recipes_packages_are_installed_beside_those_of_every_worker(tmp_path: Path) -> None:
    text = packages(tmp_path, "", "peft", *training_packages.PARTS, asks="'torch', 'peft', 'no'")
    assert text.endswith("; missing: no; pip install no")


def test_a_program_in_another_interpreter_needs_no_torch_here(tmp_path: Path) -> None:
    parts = training_packages.PARTS
    assert packages(tmp_path, "__version__ = '2.10.1'\n", *parts, asks="") == ""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("__version__ = '2.10.1+cu128'\n", "torch: got 2.10.1+cu128; expected 2.11 or newer"),
        ("__all__ = []\n__version__ = '2.11.0a0+nv26.1'\n", ""),
        ("__version__ = '3.0.0.dev20261101+rocm7.1'\n", ""),
        ("from elsewhere import __version__\n", ""),
    ],
)
def test_any_build_of_torch_that_is_new_enough_will_do(
    tmp_path: Path, version: str, expected: str
) -> None:
    text = packages(tmp_path, version, *training_packages.PARTS)
    assert text.startswith(expected) and bool(text) == bool(expected)
