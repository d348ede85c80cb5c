"""Two streams that come back as one are two again, however the pieces fall."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from holdfast.orchestrator.cli.targets.ray.stream_mux import (
    ENV,
    MARK,
    MARKED,
    Marked,
    Parted,
    mark_if_asked,
)


def parted(text: str, size: int) -> tuple[str, str]:
    """(stdout, stderr) of what comes in pieces of `size` characters."""
    out, err = io.StringIO(), io.StringIO()
    both = Parted(out, err)
    for start in range(0, len(text), size):
        both.feed(text[start : start + size])
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_what_was_marked_is_parted(size: int) -> None:
    one = io.StringIO()
    err = Marked(one)
    one.write("first\n")
    err.write("a warning")
    err.write(" of two parts\nand\rmore\n")
    one.write("second\n\n")
    err.write("\n")
    one.write("no end")
    out, said = parted(one.getvalue(), size)
    assert out == "first\nsecond\n\nno end"
    assert said == "a warning of two parts\nand\rmore\n\n"


def test_nothing_is_marked_unless_asked_and_what_is_started_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = sys.stderr
    mark_if_asked({})
    assert sys.stderr is before
    monkeypatch.setattr(sys, "stderr", before)  # puts it back
    environment = {ENV: MARKED}
    mark_if_asked(environment)
    assert isinstance(sys.stderr, Marked) and not environment


def test_a_command_that_was_asked_marks_what_it_says_beside_its_answer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.orchestrator.cli.main", "validate", "/nowhere.yaml"],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), ENV: MARKED},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"{MARK}error: /nowhere.yaml")
