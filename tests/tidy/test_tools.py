"""Style, types and import rules, as `make lint` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "check", "."], id="style"),
        pytest.param(["ruff", "format", "--check", "."], id="format"),
        pytest.param(["mypy"], id="types"),
        pytest.param(["lint-imports"], id="imports"),
    ],
)
def test_the_tools_report_no_problem(command: list[str]) -> None:
    program = BIN / command[0]
    if not program.exists():
        pytest.skip(f"{command[0]} is not installed beside {sys.executable}; make test does it")
    done = subprocess.run(
        [str(program), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
