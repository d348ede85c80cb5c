"""YAML text -> TrainingJob, with every mistake named by its path in the file.

Owns: reading, and the wording of validation errors. Must not: hold rules; the models do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import Problem, SpecError, UserError

from .document import BadDocument, faults, read
from .env import shown
from .job import PATTERNS, TrainingJob


def load_job(path: str | Path) -> TrainingJob:
    """The job in a YAML file.

    Raises UserError when the file cannot be read and SpecError when it is not a valid job.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read ({why}); expected a YAML file") from None
    return parse_job(text, source=str(path))


def parse_job(text: str, source: str = "") -> TrainingJob:
    """The job in a YAML text. Raises SpecError listing every wrong field."""
    try:
        document = read(text)
    except BadDocument as error:
        raise SpecError([error.problem], source) from None
    return job_from_mapping(document, source)


def job_from_mapping(document: Any, source: str = "") -> TrainingJob:
    """The job in a parsed document. Raises SpecError listing every wrong field."""
    if not isinstance(document, Mapping):
        got = "nothing" if document is None else type(document).__name__
        problem = Problem("the document", got, "a mapping with apiVersion, kind, metadata and spec")
        raise SpecError([problem], source)
    if problems := faults(document):
        raise SpecError(problems, source)
    try:
        return TrainingJob.model_validate(document)
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors(include_url=False)]
        raise SpecError(_distinct(problems), source) from None


def job_to_mapping(job: TrainingJob) -> dict[str, Any]:
    """The document again, with YAML names, without what was left at its default."""
    mapping = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"apiVersion": job.api_version, "kind": job.kind, **mapping}


def _problem(details: ErrorDetails) -> Problem:
    location = [part for part in details["loc"] if not _is_union_branch(part)]
    field = ".".join(str(part) for part in location) or "the document"
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return _from_rule(field, details["input"], str(context["error"]))
    if kind == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        fix = f"did you mean {close[0]}?" if close else "remove it"
        return Problem(field, "an unknown key", "one of " + ", ".join(known), fix)
    if kind == "missing":
        return Problem(field, "nothing", "a value: this key is required", "add it")
    if kind == "string_pattern_mismatch":
        return Problem(field, _show(details["input"]), PATTERNS[context["pattern"]])
    got = _show(details["input"])
    if len(location) == 3 and location[:2] == ["spec", "env"]:
        got = shown(str(location[2]), got)
    return Problem(field, got, _expected(field, details), _fix(field, details))


_EXPECTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
}
"""pydantic's kind of error -> what is expected, where its own words are those of Python."""
_TOO_MUCH = ("finite_number", "less_than_equal")
_NEVER = (
    "spec.activeDeadlineSeconds",
    "spec.recovery.capacityTimeoutSeconds",
    "spec.ttlSecondsAfterFinished",
)
"""Durations without which there is no limit."""


def _expected(field: str, details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in _TOO_MUCH and "Seconds" in field.rpartition(".")[2]:
        return f"at most {limits.MAX_SECONDS} seconds (ten years)"
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    text = re.sub(r"^(Input|Value|String|Tuple) should (be|have) ", "", details["msg"])
    return text.partition(", unable to parse")[0].replace("'", "")


def _fix(field: str, details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    if value is None:
        empty = ' ("" is an empty text)' if kind == "string_type" else ""
        return f"give it a value{empty}, or remove the key"
    if kind in _TOO_MUCH and field in _NEVER:
        return "leave it out for no limit"
    return "put it in quotes" if kind == "string_type" and _is_scalar(value) else ""


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _from_rule(field: str, value: Any, text: str) -> Problem:
    """Our rules speak as `sub.path: got X; expected Y; fix`; others say what is expected."""
    match = re.match(r"^(?:([\w. ]+): )?got (.*?); expected (.*?)(?:; (.*))?$", text, re.DOTALL)
    if match:
        path = f"{field}.{match[1]}" if match[1] else field
        return Problem(path, match[2], match[3], match[4] or "")
    return Problem(field, _show(value), text.removeprefix("expected "))


def _is_union_branch(part: int | str) -> bool:
    """pydantic adds the tried branch of a union to the path; the user did not write it."""
    return isinstance(part, str) and bool(
        re.search(r"[\[\(]|^(int|float|bool|str)$|^(literal|constrained-)", part)
    )


def _known_keys(location: list[int | str]) -> list[str]:
    model: Any = TrainingJob
    for part in location:
        fields = {f.alias or n: f for n, f in model.model_fields.items()}
        annotation = fields[str(part)].annotation if str(part) in fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = models[0]
    return sorted(f.alias or n for n, f in model.model_fields.items())


def _show(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _distinct(problems: list[Problem]) -> list[Problem]:
    """Unions report one problem per branch; keep one per field, with the expectations joined."""
    merged: dict[str, Problem] = {}
    for problem in problems:
        seen = merged.get(problem.field)
        if seen is None:
            merged[problem.field] = problem
        elif problem.expected not in seen.expected:
            both = f"{seen.expected} or {problem.expected}"
            merged[problem.field] = Problem(seen.field, seen.got, both, seen.fix or problem.fix)
    return list(merged.values())
