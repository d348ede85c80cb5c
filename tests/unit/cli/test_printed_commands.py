"""Each `holdfast` command that a page or a help text prints is one that the CLI takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from holdfast.orchestrator.cli.main import EPILOG, app
from holdfast.orchestrator.cli.options import complete
from tests.pages import PAGES, ROOT, blocks

PROGRAM: Any = typer.main.get_command(app)
_INLINE = re.compile(r"`(holdfast [^`]+)`")
_PROGRAMS = re.compile(r"^(\$ )?(\.venv/bin/|kubectl )?holdfast ")


def helps(command: Any) -> Iterator[str]:
    yield command.help or ""
    for child in getattr(command, "commands", {}).values():
        yield from helps(child)


def printed() -> Iterator[str]:
    """Commands without placeholders for something else than a word."""
    texts = [page.read_text() for page in PAGES]
    lines = [line for text in texts for block in blocks(text, "bash", "") for line in block]
    lines += re.split(r"  {3,}", EPILOG.replace("\n", "   "))
    for text in (*texts, *helps(PROGRAM)):
        lines += [" ".join(line.split()) for line in _INLINE.findall(text)]
    for line in dict.fromkeys(lines):
        if _PROGRAMS.match(line) and not re.search(r" \| | \.\.\.|\[|--[a-z]+/", line):
            yield _PROGRAMS.sub("", line)


@pytest.mark.parametrize("line", list(printed()))
def test_the_command_line_is_valid(line: str) -> None:
    words = complete([re.sub(r"^[A-Z]$", "3", word) for word in shlex.split(line, comments=True)])
    command, name = PROGRAM, ""
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands
        command = command.commands[name]
    if not words:
        return  # the name of a command
    try:
        command.make_context(name, words)
    except typer.Exit:
        return  # --help
    except typer.BadParameter as error:  # the text around an option names the job
        assert error.param is not None and error.param.param_type_name == "argument", error
        command.make_context(name, ["my-job", *words])


def test_many_commands_are_printed_and_wrong_ones_would_be_found() -> None:
    assert ROOT / "README.md" in PAGES and len(set(printed())) > 100
    with pytest.raises(typer.BadParameter.__mro__[1], match="No such option"):
        PROGRAM.commands["run"].make_context("run", ["train.py", "--node", "2"])
