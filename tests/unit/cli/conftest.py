"""The CLI in this process: arguments in, exit code and text out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.orchestrator.cli.main import main
from holdfast.orchestrator.cli.targets import local
from holdfast.orchestrator.parts import part


class Result(NamedTuple):
    code: int
    out: str
    err: str


Holdfast = Callable[..., Result]
NEEDED = {
    "spec plan": "command plan", "spec preflight": "command preflight", "ui": "command ui",
    "operator": "command operator", "--kubernetes": "target kubernetes", "--ray": "target ray",
    "plan": "command plan", "--kubeconfig": "target kubernetes", "--crd": "resource definition",
}  # fmt: skip
"""Word of a command line -> the part that it needs; without the part, its tests are skipped."""


@pytest.fixture
def holdfast(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Holdfast:
    """`holdfast("spec plan", "--json")`, in an empty home and without a fork."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(local, "supervise", lambda what: 0)

    def run(*arguments: str | Path) -> Result:
        if missing := [w for w in arguments if w in NEEDED and part(NEEDED[str(w)]) is None]:
            pytest.skip(f"a part is not installed: {missing[0]}")
        with pytest.raises(SystemExit) as ended:
            verb, rest = arguments[:1], arguments[1:]
            main([*" ".join(map(str, verb)).split(), *map(str, rest)])
        code = ended.value.code
        assert isinstance(code, int)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """`write(text)` -> path of a spec file, with a train.py beside it."""

    def write_file(text: str) -> Path:
        (tmp_path / "train.py").write_text("print('hello')\n")
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write_file
