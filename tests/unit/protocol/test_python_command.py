"""The import path of child processes holds nothing but Holdfast where Holdfast is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast.orchestrator.protocol import python_command

PRINT = "from holdfast.orchestrator.protocol import python_command as p; print(p.import_path())"


def test_an_installed_copy_adds_nothing_to_the_import_path() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-P", "-c", PRINT]
    assert subprocess.check_output(words, env=environment, text=True).strip() == ""
    path = subprocess.check_output(words, env={**environment, "PYTHONPATH": "/mine"}, text=True)
    assert path.strip() == "/mine"


def test_a_copy_that_is_not_installed_adds_its_directory(tmp_path: Path) -> None:
    (tmp_path / "holdfast").symlink_to(Path(holdfast.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-P", "-c", PRINT]
    path = subprocess.check_output(words, env=environment, text=True).strip()
    assert path.split(os.pathsep)[0] == str(tmp_path)


def test_another_version_in_site_packages_does_not_count(tmp_path: Path) -> None:
    assert not python_command._is_installed(tmp_path)
