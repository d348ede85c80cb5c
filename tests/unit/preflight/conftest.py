"""`lint(text)`: the findings of a script, as `ID line` pairs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.orchestrator.preflight import Finding, check_script

Lint = Callable[..., list[Finding]]


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """Lints a script; keywords are modules beside it: `lint(text, helpers=text)`."""

    def run(text: str, **modules: str) -> list[Finding]:
        for name, content in modules.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(text))
        found, _project = check_script(script, [tmp_path])
        return found

    return run


def places(findings: list[Finding]) -> list[tuple[str, int]]:
    """(ID, line) without notes."""
    return [(f.rule, f.line) for f in findings if f.severity != "note"]
