"""Reads tests/founding/lines: every line of the founding documents with its verdict and evidence.

Its invariant: evidence that resolve() accepts exists in the repository now.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import yaml

from holdfast.orchestrator.preflight.rules import RULES

from .figures import FIGURES

ROOT = Path(__file__).parents[2]
LINES = Path(__file__).parent / "lines"
EVIDENCE = "evidence.yaml"
SPEC = ("docs/user/job-spec.md", "docs/user/job-spec-training.md", "docs/user/job-spec-recovery.md")
"""Generated from the models, which tests/tidy checks."""

Verdict = Literal["supported", "computed", "answered", "refuted", "not supported"]
VERDICTS: tuple[Verdict, ...] = ("supported", "computed", "answered", "refuted", "not supported")


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a founding document, in our words."""

    documents: str = msgspec.field(name="in")
    """Letters of the documents; "-": beside them, in the same tables of a source."""
    line: str
    verdict: Verdict
    says: str
    """The right text; names in braces are numbers of `computed`."""
    computed: str = ""
    """Name of a function of figures.py."""
    where: tuple[str, ...] = ()
    source: str = ""
    """Outside the repository."""
    by: Literal["", "refused", "linted", "answered"] = ""
    """Answer to an error: plan or validation refuses it, preflight names it, or this page answers
    it."""

    def text(self) -> str:
        """The right text with the numbers."""
        if not self.computed:
            return self.says
        return self.says.format_map(FIGURES[self.computed]())


class Section(NamedTuple):
    title: str
    lines: dict[str, Line]


class Evidence(NamedTuple):
    """Place where a line is shown."""

    label: str
    path: str
    """Path below the root of the repository."""
    anchor: str = ""
    symbol: str = ""
    """A symbol of a Python file: a test, function or class."""


def sections() -> tuple[Section, ...]:
    files = sorted(path for path in LINES.glob("*.yaml") if path.name != EVIDENCE)
    found = []
    for path in files:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        lines = msgspec.convert(written["lines"], dict[str, Line], strict=False)
        found.append(Section(written["title"], lines))
    return tuple(found)


def all_lines() -> dict[str, Line]:
    return {name: line for section in sections() for name, line in section.lines.items()}


@cache
def short_names() -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load((LINES / EVIDENCE).read_text(encoding="utf-8"))
    return found


# -- evidence -----------------------------------------------------------------------------------
def resolve(text: str) -> Evidence:
    """Target of a word of `where`: a short name, a rule of preflight, a field of the job, or PATH,
    PATH#HEADING, PATH:SYMBOL, PATH::TEST. Raises LookupError for what does not exist."""
    if text in RULES:
        return Evidence(text, "docs/user/preflight.md", symbol=text)
    if re.fullmatch(r"\w+(\.\w+)+", text) and not (ROOT / text).exists():
        return _field(text)
    label, target = text, text
    if text in short_names():
        label, target = text.replace("_", " "), short_names()[text]
    path, _, rest = re.sub("::?", "#", target).partition("#")
    file = ROOT / path
    if not file.is_file():
        raise LookupError(f"{text}: there is no file {path}")
    if file.suffix == ".py" and rest:
        if rest not in _symbols(file):
            raise LookupError(f"{path} has no {rest}")
        return Evidence(_label(label, rest), path, symbol=rest)
    if rest and rest not in _headings(file):
        raise LookupError(f"{path} has no heading #{rest}")
    return Evidence(label.rpartition("/")[2], path, anchor=rest)


def _label(label: str, symbol: str) -> str:
    return symbol.removeprefix("test_").replace("_", " ") if "/" in label else label


def _field(text: str) -> Evidence:
    """A field below spec or spec.parallelism, by the reference pages."""
    for path, prefix in product(SPEC, ("spec", "spec.parallelism")):
        section, _, name = f"{prefix}.{text}".rpartition(".")
        page = (ROOT / path).read_text(encoding="utf-8")
        _, _, after = page.partition(f"\n## {section}\n")
        if f"\n`{name}` |" in after.partition("\n## ")[0]:
            anchor = section.replace(".", "").lower()
            return Evidence(f"{section}.{name}", path, anchor=anchor)
    raise LookupError(f"the job has no field {text}")


@cache
def _symbols(file: Path) -> set[str]:
    """Names that a module defines, methods as CLASS.METHOD."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return names


@cache
def _headings(file: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def is_test(evidence: Evidence) -> bool:
    return evidence.path.startswith("tests/") and evidence.symbol.startswith("test_")
