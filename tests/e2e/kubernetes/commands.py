"""`holdfast --kubernetes` as a person types it, in this process or in one of its own.

Owns: the options that name the cluster, and capturing. Must not: reach past the command line.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orchestrator.cli.main import main
from tests.e2e.kubernetes.rig.kubectl import Kubectl


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Commands:
    """For one namespace of a cluster."""

    def __init__(self, kubectl: Kubectl, kubeconfig: Path | None = None) -> None:
        self.where = ["--kubernetes", "--kubeconfig", str(kubeconfig or kubectl.kubeconfig)]
        self.where += ["--namespace", kubectl.namespace]

    def __call__(self, *words: str | Path) -> Result:
        return called(main, *words, *self.where)

    def json(self, *words: str) -> Any:
        result = self(*words, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    def start(self, output: Path, *words: str | Path) -> subprocess.Popen[bytes]:
        """In a process of its own, whose output goes to a file."""
        command = [sys.executable, "-m", "orchestrator.cli.main", *map(str, words), *self.where]
        with output.open("wb") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )


def called(entry: Callable[[list[str]], object], *words: str | Path) -> Result:
    """A command line in this process."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        entry([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    out.seek(0)
    return Result(ended.value.code, out.read(), err.getvalue())
