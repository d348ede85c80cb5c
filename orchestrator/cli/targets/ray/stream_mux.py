"""stdout and stderr of a command that runs elsewhere, when only one stream leads back.

Owns: the mark of a line of stderr, putting it there and taking it away. Must not: know who runs the
command, or where.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping
from typing import TextIO

ENV = "HOLDFAST_STREAMS"
MARKED = "marked"
MARK = "\x1e"
"""Before each line of stderr: a control character, which nothing that is said begins with."""


def mark_if_asked(environment: MutableMapping[str, str] = os.environ) -> None:
    """From here on, in a command that was started so. What it starts itself is not asked."""
    if environment.pop(ENV, "") == MARKED:
        sys.stderr = Marked(sys.stderr)


class Marked(io.TextIOBase):
    """Writes to another file, with the mark before each line."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._begins = file, True

    def write(self, text: str) -> int:
        for line in _lines(text):
            self._file.write(MARK + line if self._begins else line)
            self._begins = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class Parted:
    """Takes what comes back, in pieces of any length, and writes it to where it belongs."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._to, self._begins = out, True

    def feed(self, text: str) -> None:
        for line in _lines(text):
            if self._begins:
                self._to = self._err if line.startswith(MARK) else self._out
                line = line.removeprefix(MARK)
            self._to.write(line)
            self._begins = line.endswith("\n")
        self._out.flush()
        self._err.flush()


def _lines(text: str) -> list[str]:
    """With their ends. `splitlines` would also part at the mark and at carriage returns."""
    *whole, rest = text.split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])
