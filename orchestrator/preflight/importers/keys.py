"""The fields of a configuration that an importer reads, and the record of what it did not take.

A field is named by its dotted path. Each one is either taken or reported as dropped, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.orchestrator.errors import Problem, UserError

AUTO = "auto"


class Dropped(NamedTuple):
    """A field of the source without a counterpart, or whose value could not be kept."""

    field: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.field} ({self.value}): {self.why}"


class ConfigKeys:
    """Fields by dotted path; lists are values. `source` begins every message."""

    def __init__(self, document: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.dropped: list[Dropped] = []
        self._values = dict(_flat("", document))

    def problem(self, field: str, got: object, expected: str, fix: str = "") -> UserError:
        return UserError(f"{self.source}: {Problem(field, _show(got), expected, fix)}")

    def has(self, field: str) -> bool:
        return field in self._values

    def take(self, field: str) -> Any:
        """The value, which counts as read; None if the field is absent or null."""
        return self._values.pop(field, None)

    def drop(self, field: str, why: str, value: object = None) -> None:
        """Report a field that was read, or is read now, and has no effect."""
        setting = self.take(field) if value is None else value
        if setting is not None:
            self.dropped.append(Dropped(field, _show(setting), why))

    def drop_rest(self, reasons: Mapping[str, str], default: str) -> None:
        """Report what no one took; `reasons`: beginning of a path -> why."""
        for field in list(self._values):
            why = next((w for start, w in reasons.items() if field.startswith(start)), default)
            self.drop(field, why)

    def count(self, field: str, minimum: int = 1) -> int | None:
        """An integer; None if absent or `auto`. Raises UserError."""
        value = self.take(field)
        if value is None or value == AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.problem(field, value, f"an integer of at least {minimum}")
        return value

    def number(self, field: str) -> float | None:
        """A finite number that is not negative; None if absent or `auto`. Raises UserError."""
        value = self.take(field)
        if value is None or value == AUTO:
            return None
        if isinstance(value, str):  # YAML and JSON texts such as 1e-5
            try:
                value = float(value)
            except ValueError:
                raise self.problem(field, value, "a number") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
            raise self.problem(field, value, "a number of at least 0")
        return float(value)

    def flag(self, field: str) -> bool | None:
        """true or false; None if absent or `auto`. Raises UserError."""
        value = self.take(field)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or value == AUTO:
            return None
        if not isinstance(value, bool):
            raise self.problem(field, value, "true or false")
        return value

    def choice(self, field: str, choices: Mapping[str, Any]) -> Any:
        """Choice for the text of a field, without regard to case; None if absent. Raises
        UserError."""
        value = self.take(field)
        if value is None or value == AUTO:
            return None
        by_name = {name.lower(): meaning for name, meaning in choices.items()}
        if str(value).lower() not in by_name:
            raise self.problem(field, value, "one of " + ", ".join(choices))
        return by_name[str(value).lower()]


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(path, value)
        elif value != {}:
            yield path, value


def _show(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if value is None:
        text = "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
