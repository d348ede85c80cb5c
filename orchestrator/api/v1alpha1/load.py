"""YAML text -> TrainingJob, with every mistake named by its place in the file, and back.

The rules are in the models; this module reads and writes documents and words the errors.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from holdfast.orchestrator import limits
from holdfast.orchestrator.errors import Problem, SpecError, UserError

from .effects import without_effect
from .job import NAME_PATTERN, PATTERNS, TrainingJob, redacted
from .recipe import RecipeConfig, config_of
from .retired import without_retired


class BadDocument(UserError):
    """The text is not a document that Holdfast can read."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def load_job(path: str | Path) -> TrainingJob:
    """The job in a YAML file.

    Raises UserError when the file cannot be read and SpecError when it is not a valid job.
    """
    return parse_job(read_job_file(path), source=str(path))


def read_job_file(path: str | Path) -> str:
    """The text of a job file. Raises UserError."""
    if Path(path).suffix == ".py":
        expected = "a TrainingJob in YAML; `holdfast spec preflight` checks a script"
        raise UserError.of("FILE", f"{path}, a script", expected)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read ({why}); expected a YAML file") from None


def parse_job(text: str, source: str = "") -> TrainingJob:
    """The job in a YAML text. Raises SpecError listing every wrong field."""
    try:
        document = _with_words(read_yaml(text), text)
    except BadDocument as error:
        raise SpecError([error.problem], source) from None
    job = job_from_mapping(document, source)
    if problems := without_effect(job, as_written=True):
        raise SpecError(problems, source)
    return job


def job_from_mapping(document: Any, source: str = "") -> TrainingJob:
    """The job in a parsed document. Raises SpecError listing every wrong field."""
    if not isinstance(document, Mapping):
        got = "nothing" if document is None else type(document).__name__
        problem = Problem("the document", got, "a mapping with apiVersion, kind, metadata and spec")
        raise SpecError([problem], source)
    if problems := document_problems(document):
        raise SpecError(problems, source)
    document, problems = without_retired(document)
    try:
        job = TrainingJob.model_validate(document)
    except ValidationError as error:
        recipe = _mapping(dict(document), ["spec", "entrypoint", "recipe"]).get("name")
        problems += [_problem(details, recipe) for details in error.errors(include_url=False)]
    if problems:
        raise SpecError(_distinct(problems), source)
    return job


def _with_words(document: Any, text: str) -> Any:
    """The document, with the numbers in args and env as they are written: 3e-4 is not 0.0003."""
    for *path, last in (("spec", "entrypoint", "args"), ("spec", "env")):
        part = _mapping(document, path)
        if part.get(last):
            part[last] = _mapping(read_yaml(text, _WordLoader), path)[last]
    return document


def _mapping(value: Any, path: list[str]) -> dict[str, Any]:
    """The mapping at a path; empty if there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def job_to_mapping(job: TrainingJob) -> dict[str, Any]:
    """The job as a document with YAML names; fields that have their default value are left out."""
    mapping = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {"apiVersion": job.api_version, "kind": job.kind, **mapping}


# -- YAML ---------------------------------------------------------------------------------------
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, and reads numbers and dates as kubectl does."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Node] = {}
        for key, _value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                first = seen.setdefault((key.tag, key.value), key)
                if first is not key:
                    raise _repeated(first, key)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by what it merges: own keys first, then those of earlier mappings. PyYAML
        6.0.4 prefers merged keys of one letter, and the later mapping of a list."""
        values = [value for key, value in node.value if key.tag == _MERGE]
        sources = [s for v in values for s in (v.value if v.id == "sequence" else [v])]
        if all(isinstance(source, yaml.MappingNode) for source in sources):
            pairs = [pair for pair in node.value if pair[0].tag != _MERGE]
            for source in sources:
                self.flatten_mapping(source)
                pairs += source.value
            first: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
            for key, value in pairs:
                identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                first.setdefault(identity, (key, value))
            node.value = list(first.values())
        super().flatten_mapping(node)  # raises for what cannot be merged

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What PyYAML raises for a scalar that its tag does not allow, and for an overlong integer.
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            text = f"a value that is not a valid {kind}"
            raise ConstructorError(None, None, text, node.start_mark) from None


def _repeated(first: yaml.Node, second: yaml.ScalarNode) -> BadDocument:
    lines = sorted({_line(first), _line(second)})
    where = " and ".join(str(line) for line in lines)
    field = f"line{'s' if len(lines) > 1 else ''} {where}"
    got = f"the key {_printable(second.value)} twice"
    return BadDocument(Problem(field, got, "each key once", "remove one of them"))


def _line(node: yaml.Node) -> int:
    assert node.start_mark is not None
    return node.start_mark.line + 1


class _WordLoader(_Loader):
    """Reads numbers as texts."""


class _Dumper(yaml.SafeDumper):
    """Quotes each text that YAML 1.1, YAML 1.2, PyYAML or kubectl would not read as a text. A list
    that occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _read_scalars_as_kubectl_does() -> None:
    """kubectl reads 1e-4 as a number, and 12:30 and 2024-01-02 as texts; PyYAML reads a text, the
    number 750 and a date."""
    integer, number = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
    replaced = (integer, number, "tag:yaml.org,2002:timestamp")
    for loader in (_Loader, _WordLoader):
        loader.yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
    _Loader.add_implicit_resolver(
        integer,
        re.compile(r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"),
        list("-+0123456789"),
    )
    _Loader.add_implicit_resolver(
        number,
        re.compile(
            r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
            r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )
    # Also 08, which kubectl reads as the number 8, and y, which it reads as true.
    _Dumper.add_implicit_resolver(
        number,
        re.compile(r"[-+]?(?:\.?[0-9][-+0-9_.:eE]*|0[xob][0-9a-fA-F_]+)$|[yYnN]$"),
        list("-+0123456789.yYnN"),
    )


_read_scalars_as_kubectl_does()


def yaml_text(document: Mapping[str, Any]) -> str:
    """The document as YAML, from which `read_yaml` reads the same values."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100)


def read_yaml(text: str, loader: type[yaml.SafeLoader] = _Loader) -> Any:
    """The document in a YAML text. Raises BadDocument."""
    if len(text) > limits.MAX_DOCUMENT_BYTES:
        raise BadDocument(_too_large())
    try:
        return yaml.load(text, loader)
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
            fix = "write each job into its own file"
            problem = Problem(where, "a second document", "one in a file", fix)
        else:
            problem = Problem(where, error.problem or "invalid YAML", "valid YAML")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the text"
        got = getattr(error, "problem", None) or "text that is no YAML"
        if got.startswith("expected"):  # "expected ',' or ']', but got '<stream end>'"
            got = f"text that is no YAML ({got})"
        problem = Problem(where, got, "valid YAML")
    except RecursionError:
        problem = _too_deep()
    raise BadDocument(problem) from None


def document_problems(document: Any) -> list[Problem]:
    """Reason why the document cannot be written as JSON, or cannot reach a process as text."""
    size = 0
    try:
        # In chunks: a few lines of aliases can stand for more than memory holds.
        for chunk in json.JSONEncoder(ensure_ascii=False).iterencode(document):
            size += len(chunk)
            if size > limits.MAX_DOCUMENT_BYTES:
                return [_too_large()]
    except RecursionError:
        return [_too_deep()]
    except (TypeError, ValueError) as error:  # a set or bytes; an alias inside its own anchor
        expected = "mappings, lists, texts and numbers"
        return [Problem("the document", str(error), expected, "write it without YAML tags")]
    return [
        Problem(
            _printable(".".join(path)) or "the document",
            f"a text with the character U+{ord(match[0]):04X} in it",
            "text without NUL and without halves of surrogate pairs",
            "remove it",
        )
        for path, text in _texts((), document)
        if (match := re.search("[\0\ud800-\udfff]", text))
    ]


def _texts(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each text and each key, with the path of its field."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield path, str(key)
            yield from _texts((*path, str(key)), child)
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            yield from _texts((*path, str(number)), child)


def _too_large() -> Problem:
    got = f"more than {limits.MAX_DOCUMENT_BYTES} characters, aliases counted in full"
    return Problem("the document", got, "fewer", "write less, or fewer aliases")


def _too_deep() -> Problem:
    got = "too many lists and mappings inside each other"
    return Problem("the document", got, "fewer levels", "is a bracket or an alias too many?")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# -- validation errors --------------------------------------------------------------------------
def _problem(details: ErrorDetails, recipe: Any) -> Problem:
    location = [part for part in details["loc"] if not _is_union_branch(part)]
    field = ".".join(str(part) for part in location) or "the document"
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return _from_rule(field, details["input"], str(context["error"]))
    if kind == "extra_forbidden":
        fields = _known_keys(location[:-1], recipe)
        close = difflib.get_close_matches(str(location[-1]), fields, n=1)
        fix = f"did you mean {close[0]}?" if close else "remove it"
        return Problem(field, "an unknown key", "one of " + ", ".join(fields), fix)
    if kind == "missing":
        return Problem(field, "nothing", "a value: this key is required", "add it")
    if kind == "string_pattern_mismatch":
        meant = re.sub(r"[^a-z0-9]+", "-", str(details["input"]).lower()).strip("-")
        fix = f"for example {meant}" if context["pattern"] == NAME_PATTERN and meant else ""
        return Problem(field, _show(details["input"]), PATTERNS[context["pattern"]], fix)
    got = _show(details["input"])
    if len(location) == 3 and location[:2] == ["spec", "env"]:
        got = redacted(str(location[2]), got)
    return Problem(field, got, _expected(field, details), _fix(field, details, recipe))


_EXPECTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "string_too_short": "a text that is not empty",
}
"""pydantic's error type -> what is expected, where pydantic names a Python type."""
_ABOVE_MAXIMUM = ("finite_number", "less_than_equal")
_NO_LIMIT_IF_ABSENT = (
    "spec.activeDeadlineSeconds",
    "spec.recovery.capacityTimeoutSeconds",
    "spec.ttlSecondsAfterFinished",
)
"""Durations that have no limit when they are left out."""


def _expected(field: str, details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in _ABOVE_MAXIMUM and "Seconds" in field.rpartition(".")[2]:
        return f"at most {limits.MAX_SECONDS} seconds (ten years)"
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    text = re.sub(r"^(Input|Value|String|Tuple) should (be|have) ", "", details["msg"])
    return text.partition(", unable to parse")[0].replace("'", "")


def _fix(field: str, details: ErrorDetails, recipe: Any) -> str:
    kind, value = details["type"], details["input"]
    if value is None:
        empty = ' ("" is an empty text)' if kind == "string_type" else ""
        return f"give it a value{empty}, or remove the key"
    if kind == "model_type" and value in _known_keys([*field.split(".")], recipe):
        return f"write {{{value}: {{}}}}"
    if field in ("spec.nodes.max", "spec.nodes.min") and value == 0:
        return "for no nodes set suspend: true"
    if kind in _ABOVE_MAXIMUM and field in _NO_LIMIT_IF_ABSENT:
        return "leave it out for no limit"
    is_plain = kind == "string_type" and isinstance(value, (bool, int, float))
    return "put it in quotes" if is_plain else ""


def _from_rule(field: str, value: Any, text: str) -> Problem:
    """Validators of the models raise `sub.path: got X; expected Y; fix`, or only what is
    expected."""
    if re.match(r"([\w. ]+: )?got .*; expected ", text, re.DOTALL):
        return Problem.from_text(field + (": " if text.startswith("got ") else ".") + text)
    return Problem(field, _show(value), text.removeprefix("expected "))


def _is_union_branch(part: int | str) -> bool:
    """True if pydantic added this part: the branch of a union that it tried."""
    return isinstance(part, str) and bool(
        re.search(r"[\[\(]|^(int|float|bool|str)$|^(literal|constrained-)", part)
    )


def _known_keys(location: list[int | str], recipe: Any) -> list[str]:
    model: Any = TrainingJob
    for part in location:
        fields = {f.alias or n: f for n, f in model.model_fields.items()}
        annotation = fields[str(part)].annotation if str(part) in fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        model = config_of(recipe) if models[0] is RecipeConfig else models[0]
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
