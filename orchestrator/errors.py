"""The errors a user can cause. Each names the field, what was got, what was expected and the fix.

Owns: the exception types that the command line turns into exit code 2 (or 1 for failures that are
nobody's mistake). Must not: be raised for our own bugs; those are assertions.
"""

from __future__ import annotations

from dataclasses import dataclass


class HoldfastError(Exception):
    """Something went wrong that a person should read about: one paragraph, no traceback.

    `exit_code` follows the usual convention: 2 for a mistake in what was asked for, 1 for a failure
    of what was asked for.
    """

    exit_code = 1


class UserError(HoldfastError):
    """What was asked for cannot be done as asked."""

    exit_code = 2


class Damaged(HoldfastError):
    """The contents of a file are not what was written; no other attempt and no other version would
    read them. A file that cannot be read now, or that another version wrote, is not damaged."""


@dataclass(frozen=True)
class Problem:
    """One wrong field.

    `field` is the dotted path as written in the YAML (`spec.parallelism.shard`), `got` what stood
    there, `expected` what may stand there and `fix` what to do about it.
    """

    field: str
    got: str
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: got {self.got}; expected {self.expected}"
        return f"{text}; {self.fix}" if self.fix else text


class SpecError(UserError):
    """A job spec with one or more wrong fields; all of them are listed, not only the first."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source
        where = f"{source}: " if source else ""
        head = f"{where}{len(problems)} problem{'s' if len(problems) != 1 else ''} in the job spec"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in problems)]))
