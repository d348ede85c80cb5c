"""The commands in the text of a shell script, as far as they can be known without running it.

Comments, here-documents and the arguments of other commands are no commands. A variable is not
replaced: what it holds is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_KEYWORDS = frozenset(("if", "then", "elif", "else", "while", "until", "do", "{", "!", "coproc"))
"""A command follows them."""
_WORD = re.compile(
    r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|\$\(\(.*?\)\)|\$[#?$!@*-]?|[^\s\\'"$;&|()<>`])+""",
    re.DOTALL,
)
_HERE = re.compile(r"<<-?\s*(\\?)(['\"]?)(\w+)\2")
_REDIRECTION = re.compile(r"\d*(&>>?|[<>]{1,3}[&|]?)\s*(?=[^\s<>()])")
_COMMENT = re.compile(r"#[^\n]*")
_INSIDE = re.compile(r"\$\(|`")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without quotes."""
    text = re.sub(r"\\\r?\n[ \t]*", " ", text)
    words: list[str] = []
    ends: list[str] = []  # of here-documents that begin in this line
    at, is_target = 0, False
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            at += 1
        elif char == "#" and (at == 0 or text[at - 1] in " \t\r\n;&|()"):
            at = _end(_COMMENT, text, at)
        elif here := _HERE.match(text, at):
            ends.append(here[3])
            at = here.end()
        elif found := _REDIRECTION.match(text, at):
            at, is_target = found.end(), True
        elif word := _WORD.match(text, at):
            yield from _inside(word[0])
            if not is_target and (words or word[0] not in _KEYWORDS):
                words.append(_unquoted(word[0]))
            at, is_target = word.end(), False
        else:  # an operator, or the end of a line
            yield from [words] if words else []
            words, is_target, at = [], False, at + 1
            if char == "\n":
                at, ends = _after(text, at, ends), []
    if words:
        yield words


def _inside(word: str) -> Iterator[list[str]]:
    """Commands whose output a word in double quotes takes."""
    for quoted in re.findall(r'"(?:\\.|[^"\\])*"', word):
        for found in _INSIDE.finditer(quoted):
            yield from commands(quoted[found.end() : -1])


def _after(text: str, at: int, ends: list[str]) -> int:
    """The place after the here-documents that begin at `at`."""
    for end in ends:
        found = re.compile(rf"^\t*{end}[ \t\r]*$", re.MULTILINE).search(text, at)
        at = found.end() if found else at  # `((a << b))` begins none
    return at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at + 1


def _unquoted(word: str) -> str:
    parts = re.findall(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^'"\\]+|.""", word, re.DOTALL)
    plain = []
    for part in parts:
        if len(part) > 1 and part[0] in "'\"":
            plain.append(part[1:-1])
        else:
            plain.append(part[1:] if part[0] == "\\" and len(part) > 1 else part)
    return "".join(plain)
