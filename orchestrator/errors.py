"""Errors that a user reads: one paragraph, no traceback, with an exit code.

Our own bugs raise AssertionError instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


def installation(extra: str) -> str:
    """Command that installs Holdfast with an extra, from source until an index has it."""
    return f"pip install '.[{extra}]' in a checkout of Holdfast"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class HoldfastError(Exception):
    """A failure with a message for the user. `exit_code`: 2 for a mistake in the request, 1 for a
    failure of the request."""

    exit_code = 1

    @classmethod
    def of(cls, field: str, got: str, expected: str, fix: str = "") -> Self:
        """The error of one wrong field, see Problem."""
        return cls(str(Problem(field, got, expected, fix)))

    @staticmethod
    def of_command(code: int, output: str) -> HoldfastError:
        """The error with which a command ended; `output`: its stderr."""
        message = re.search(r"^error: (.*)", output, re.MULTILINE | re.DOTALL)
        text = message[1] if message else f"the command ended with code {code}: {output[-2000:]}"
        return (UserError if code == UserError.exit_code else HoldfastError)(text.strip())


class UserError(HoldfastError):
    """The request cannot be carried out as it was made."""

    exit_code = 2


class Damaged(HoldfastError):
    """The contents of a file are not what was written: no retry and no other version can read it. A
    file that cannot be read now, or that another version wrote, is not damaged."""


@dataclass(frozen=True)
class Problem:
    """One wrong field.

    `field` is the dotted path as written in the YAML (`spec.parallelism.shard`), `got` the value
    found, `expected` what is allowed and `fix` what the user can do.
    """

    field: str
    got: str
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: got {self.got}; expected {self.expected}"
        return f"{text}; {self.fix}" if self.fix else text

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The problem in a text that `str` gives."""
        match = re.fullmatch("(.+?): got (.*?); expected (.*?)(?:; (.*))?", text, re.DOTALL)
        assert match, text
        return cls(match[1], match[2], match[3], match[4] or "")


class SpecError(UserError):
    """A job spec with one or more wrong fields; the message lists all of them."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source
        where = f"{source}: " if source else ""
        head = f"{where}{len(problems)} problem{'s' if len(problems) != 1 else ''} in the job spec"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in problems)]))
