"""Failures of py-spy, with the fix where the kernel refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.workers.agent.pool import py_spy
from holdfast.workers.agent.pool.stack_activity import in_one_form

DENIED = "Error: Permission Denied: Try running again with elevated permissions by going 'sudo'\n"


@pytest.mark.parametrize(
    ("scope", "fix"),
    [
        (None, "SYS_PTRACE"),
        ("1\n", "SYS_PTRACE"),
        ("2\n", "kernel.yama.ptrace_scope is 2; set it to 1 or 0"),
        ("3\n", "at the next boot"),
    ],
)
def test_a_refusal_of_the_kernel_names_the_fix(
    scope: str | None, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "YAMA", tmp_path / "ptrace_scope")
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(scope)
    text = py_spy.explained(DENIED)
    assert "ptrace" in text and fix in text


def test_other_failures_have_py_spys_own_words() -> None:
    text = py_spy.explained("warning\nError: No such file or directory (os error 2)\n")
    assert text == "py-spy: Error: No such file or directory (os error 2)"
    assert "without a message" in py_spy.explained("")


def test_frames_of_both_tools_have_one_form() -> None:
    assert in_one_form('File "/a/train.py", line 7 in step') == "step (/a/train.py:7)"
    assert in_one_form("step (/a/train.py:7)") == "step (/a/train.py:7)"
