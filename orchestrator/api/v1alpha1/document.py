"""YAML text -> plain mappings, lists and values, without what only YAML has.

Owns: reading, and refusing what YAML lets through and nothing behind it can hold: keys written
twice, values without an end, dates, texts that neither UTF-8 nor an environment takes. Must not:
know what a document is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import Problem, UserError

from .env import shown

Path = tuple[str, ...]

_INTEGER = "tag:yaml.org,2002:int"
_KINDS = {
    "tag:yaml.org,2002:timestamp": "a date that there is",
    _INTEGER: "an integer of fewer digits",
}
"""Tag -> what is expected of a value that has it but cannot be read."""
_MERGE = "tag:yaml.org,2002:merge"
QUOTES = "put it in quotes to mean a text"

# What a file name, an environment variable and UTF-8 cannot hold.
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")


class BadDocument(UserError):
    """The text is no document."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def read(text: str) -> Any:
    """The document in a YAML text. Raises BadDocument."""
    try:
        return yaml.load(text, _Loader)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        got = f"the character U+{ord(text[error.position]):04X}"
        expected = "text without control characters"
        problem = Problem(f"line {line}, column {column}", got, expected, "remove it")
    except ComposerError as error:
        assert error.problem_mark is not None
        where = f"line {error.problem_mark.line + 1}"
        if "single document" in (error.context or ""):
            fix = "give every job a file of its own"
            problem = Problem(where, "a second document", "one in a file", fix)
        else:
            problem = Problem(where, error.problem or "not YAML", "valid YAML")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the text"
        problem = Problem(where, getattr(error, "problem", None) or "not YAML", "valid YAML")
    raise BadDocument(problem) from None


def faults(document: Any) -> list[Problem]:
    """What cannot be handed on, wherever in the document it stands."""
    return list(_faults(document))


def _faults(document: Any) -> Iterator[Problem]:
    todo: list[tuple[Path, Any]] = [((), document)]
    number = 0
    while todo:
        path, value = todo.pop()
        number += 1
        if number > limits.MAX_VALUES:
            got = f"more than {limits.MAX_VALUES} values, those of aliases counted"
            yield Problem("the document", got, "fewer", "write less, or fewer aliases")
            return
        if len(path) > limits.MAX_DEPTH:
            yield _too_deep(path)
            return
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and _UNUSABLE.search(key):
                    yield _unusable(path, key, "a key")
            below = [((*path, str(key)), child) for key, child in value.items()]
            todo += reversed(below)
        elif isinstance(value, (list, tuple)):
            todo += reversed([((*path, str(n)), child) for n, child in enumerate(value)])
        elif isinstance(value, str):
            if _UNUSABLE.search(value):
                yield _unusable(path, value, "a text")
        elif isinstance(value, date):
            got = f"{_short(path, str(value))}, which YAML takes for a date"
            yield Problem(_field(path), got, "a text, a number, a list or a mapping", QUOTES)
        elif value is not None and not isinstance(value, (bool, int, float)):
            got = f"a {type(value).__name__}"
            yield Problem(_field(path), got, "a text, a number, a list or a mapping")


def _unusable(path: Path, text: str, what: str) -> Problem:
    found = _UNUSABLE.search(text)
    assert found is not None
    got = f"{what} with the character U+{ord(found[0]):04X} in it"
    if found[0] == "\0":
        return Problem(_field(path), got, f"{what} that a process can be given", "remove it")
    fix = "write the character itself, not its two halves"
    return Problem(_field(path), got, f"{what} that UTF-8 can hold", fix)


def _too_deep(path: Path) -> Problem:
    got = f"more than {limits.MAX_DEPTH} levels, one in the other"
    return Problem(_field(path[:4]), got, "fewer", "is a bracket or an alias too many?")


class _Loader(yaml.SafeLoader):
    """Keeps the path of each node, so that what is wrong is told by its field."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._path: list[str] = []
        self._depth = 0
        """More than the path has where a mapping is a key."""
        self._fields: dict[yaml.Node, Path] = {}
        self._open: set[str] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Of the value of a key, `index` is the key's node; of the key itself it is None."""
        if index is not None:
            self._path.append(index.value if isinstance(index, yaml.ScalarNode) else str(index))
        path = tuple(self._path)
        self._depth += 1
        if self._depth > limits.MAX_DEPTH + 1:
            raise BadDocument(_too_deep(path))
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor: str | None = getattr(event, "anchor", None)
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and anchor in self._open:
            got = f"*{anchor} in line {_line(event)}, inside of what it stands for"
            expected = "a value with an end"
            raise BadDocument(Problem(_field(path), got, expected, "name another anchor"))
        own = {anchor} if anchor and not is_alias else set()
        self._open |= own
        node = super().compose_node(parent, index)
        self._open -= own
        self._depth -= 1
        if node is not None:
            self._fields.setdefault(node, path)
        if isinstance(node, yaml.MappingNode):
            _expect_distinct(node, path)
        if index is not None:
            self._path.pop()
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What the library's constructors raise for a scalar that is not what its tag says.
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            path = self._fields.get(node, ())
            expected = _KINDS.get(node.tag, f"a value that {node.tag.rpartition(':')[2]} can be")
            got = f"{_short(path, str(node.value))} in line {_line(node)}"
            fix = "" if node.tag == _INTEGER else QUOTES
            raise BadDocument(Problem(_field(path), got, expected, fix)) from None


_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")


def _read_numbers_as_kubectl_does() -> None:
    """1e-4 is one, which to PyYAML is a text, and 12:30 is a text, which to PyYAML is 750."""
    numbers = (_INTEGER, "tag:yaml.org,2002:float")
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in numbers]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _Loader.add_implicit_resolver(numbers[0], _INT, list("-+0123456789"))
    _Loader.add_implicit_resolver(numbers[1], _FLOAT, list("-+0123456789."))


_read_numbers_as_kubectl_does()


def _expect_distinct(node: yaml.MappingNode, path: Path) -> None:
    """Raises BadDocument: of two, the last one would win without a word."""
    seen: dict[tuple[str, str], yaml.Node] = {}
    for key, _value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        first = seen.setdefault((key.tag, key.value), key)
        if first is not key:
            lines = [_line(one) for one in (first, key)]
            where = (
                f"lines {lines[0]} and {lines[1]}" if lines[0] != lines[1] else f"line {lines[0]}"
            )
            problem = Problem(
                _field((*path, key.value)),
                f"the key {_printable(key.value)} twice, in {where}",
                "each key once",
                "remove one of them",
            )
            raise BadDocument(problem)


def _line(place: yaml.Event | yaml.Node) -> int:
    mark = place.start_mark
    assert mark is not None, "only what is made without a text has none"
    return mark.line + 1


def _short(path: Path, text: str) -> str:
    """A value as it may be printed."""
    text = shown(path[-1], text) if {"env", "env_vars"} & set(path) else _printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def _field(path: Path) -> str:
    return _printable(".".join(path)) or "the document"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
