"""`holdfast checkpoint verify` and `export` import nothing from the user's directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.workers.checkpoint.fake_ranks import staged
from tests.unit.workers.checkpoint.test_files import write


def test_modules_in_the_users_directory_are_not_imported(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    write(place, staged(1, 2))
    (tmp_path / "workers").mkdir()
    for name in ("random", "numpy", "fsspec", "workers/__init__"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    holdfast = [sys.executable, "-P", "-m", "holdfast.orchestrator.cli.main", "checkpoint"]
    for words, said in (
        (["verify", place], "is intact: 2 files"),
        (["export", place, tmp_path / "out"], "model.safetensors"),
    ):
        done = subprocess.run(
            [*holdfast, *map(str, words)], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
