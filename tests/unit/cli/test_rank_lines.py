"""Lines of rank 0 beside the display of `holdfast run`, and the stacks of ranks as text."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest

from holdfast.orchestrator.cli import output, rank_lines
from holdfast.orchestrator.cli.commands.ranks import stack_lines
from holdfast.orchestrator.cli.display import LineDisplay, LiveDisplay
from holdfast.orchestrator.cli.rank_lines import RankLines
from holdfast.orchestrator.protocol.rank_stacks import CollectiveSpan, RankStacks
from holdfast.orchestrator.runtime.job_directory import JobDirectory


def write(directory: JobDirectory, generation: int, text: str) -> None:
    path = directory.rank_log(generation, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_lines_of_each_generation_are_shown_until_the_end(tmp_path: Path) -> None:
    directory, shown = JobDirectory(tmp_path / "demo"), list[str]()
    with RankLines(directory, shown.append):
        write(directory, 1, "one\n 10%|\r100%|####|\nlast words")
        write(directory, 2, "two\n")
        write(directory, 2, "the end")
    assert shown == ["one", "100%|####|", "last words", "two", "the end"]


def test_lines_of_a_generation_that_ended_between_two_looks_are_shown(tmp_path: Path) -> None:
    directory, shown = JobDirectory(tmp_path / "demo"), list[str]()
    write(directory, 1, "before\n")
    with RankLines(directory, shown.append, interval_s=60.0):  # looks at the end only
        write(directory, 1, "after\n")
        write(directory, 2, "short")
        write(directory, 3, "shorter\n")
        write(directory, 4, "the end")
    assert shown == ["after", "short", "shorter", "the end"]


def test_what_was_printed_before_is_not_shown_again(tmp_path: Path) -> None:
    directory, shown = JobDirectory(tmp_path / "demo"), list[str]()
    write(directory, 4, "before\n")
    with RankLines(directory, shown.append):
        write(directory, 4, "after\n")
    assert shown == ["after"]


def test_of_many_lines_the_last_ones_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_lines, "MAX_LINES", 2)
    directory, shown = JobDirectory(tmp_path / "demo"), list[str]()
    write(directory, 1, "")
    with RankLines(directory, shown.append):
        write(directory, 1, "a\nb\nc\nd\n")
    assert shown[-2:] == ["c", "d"] and "not shown; see `holdfast logs`" in shown[0]


def test_displays_name_the_rank() -> None:
    for kind in (LineDisplay, LiveDisplay):
        with kind(output.console(to := io.StringIO())) as display:
            display.line("\x1b[32mstep 3\x1b[0m [ok]")
        assert re.sub("\x1b.*?m", "", to.getvalue()) == "[rank 0] step 3 [ok]\n"


def test_stacks_as_text() -> None:
    span = CollectiveSpan("default_pg", "gloo:all_reduce", 41, 42, num_done=1, num_ranks=7)
    entries = [
        RankStacks((0, 1, 2, 3, 4, 5, 6), ("wait (/v/site-packages/t/a.py:1)", "step (b.py:2)"),
                   "peers", collectives=(span,)),
        RankStacks((7,), (), "", "stopped", problem="ptrace is not allowed"),
    ]  # fmt: skip
    assert stack_lines({"stacks": msgspec.to_builtins(entries)}) == [
        "ranks 0-6: in a collective",
        "  wait (t/a.py:1)",
        "  step (b.py:2)",
        "  newest collective of group default_pg: gloo:all_reduce 41 to 42, done on 1 of 7 ranks",
        "",
        "rank 7: stopped",
        "  ptrace is not allowed",
    ]
