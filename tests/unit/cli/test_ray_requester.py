"""The name of who asks, which comes from outside where somebody else runs the command."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from holdfast.orchestrator.cli.targets.ray import requester

ODD = "ada; $(exit 1) 'x'\x1b[2J\nroot"


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ("ada", "ada"),
        ("", ""),  # who asked had no name; the cluster's user has not
        ("a\x1b[2Jb\nc\td\u202ee", "a[2Jbcde"),
        ("\udcff", ""),  # bytes that are no text
        ("x" * 1000, "x" * requester.MOST_CHARS),
    ],
)
def test_a_name_from_outside_is_short_and_printable(
    told: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(requester.BY, told)
    assert requester.asks() == taken


def test_a_name_is_handed_on_through_a_shell_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(requester.BY, raising=False)
    monkeypatch.setenv("LOGNAME", ODD)
    command = requester.handed_on(shlex.join(["printenv", requester.BY]))
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert told == "ada; $(exit 1) 'x'[2Jroot\n"
