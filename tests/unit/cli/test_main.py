"""The kubectl plugin, and options that do not fit the target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.orchestrator.cli.main import reordered

from .conftest import Holdfast


@pytest.mark.parametrize(
    ("typed", "reordered_words"),
    [
        ("status demo -n team", "status demo -n team"),
        ("-n team status demo", "status demo -n team"),
        ("-nteam --context=c checkpoint list demo", "checkpoint list demo -nteam --context=c"),
        ("--help", "--help"),
        ("-n", "-n"),
    ],
)
def test_options_of_kubectl_may_precede_the_verb(typed: str, reordered_words: str) -> None:
    assert reordered(typed.split()) == reordered_words.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "-n", "team"], "--namespace: got team without --kubernetes; expected it"),
        (["run", "x.yaml", "--context", "c"], "--context: got c without --kubernetes"),
        (["status", "--kubernetes", "--home", "/x"], "--home: got --home and --kubernetes"),
        (["status", "--kubernetes", "--kubeconfig", "/nope"], "got /nope (no such file)"),
    ],
    ids=["namespace", "context", "home", "kubeconfig"],
)
def test_options_of_different_targets_are_refused(
    arguments: list[str], message: str, holdfast: Holdfast
) -> None:
    result = holdfast(*arguments)
    assert result.code == 2 and message in result.err


def test_json_has_every_character_whatever_the_encoding_of_the_output() -> None:
    output = "from holdfast.orchestrator.cli.output import print_json; print_json"
    program = f"{output}(['caf\\u00e9 \\U0001f600'])"
    for encoding in ("ascii", "latin-1", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True
        )
        assert json.loads(done.stdout.decode(encoding)) == ["caf\u00e9 \U0001f600"]


@pytest.mark.parametrize("words", ["--version", "checkpoint --help", "spec schema", ""])
def test_output_that_a_full_disk_does_not_take_is_reported(words: str) -> None:
    command = [sys.executable, "-m", "holdfast.orchestrator.cli.main", *words.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: output: got No space left on device; expected")
    assert done.stderr.count("\n") == 1


def test_the_plugin_is_installed_under_the_name_that_kubectl_expects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["kubectl-holdfast"] == f"{reordered.__module__}:kubectl_main"
    program = f"import {reordered.__module__} as m; m.kubectl_main()"
    done = subprocess.run([sys.executable, "-c", program, "-h"], capture_output=True, check=True)
    assert b"-completion" not in done.stdout, "kubectl completes its own words"
