"""The user's script and the modules beside it that it imports, as syntax trees; nothing is run.

A project is bounded: at most MAX_MODULES files of MAX_FILE_BYTES. Names are resolved through
imports, re-exports and plain assignments to the full name that the user's code means.
"""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.orchestrator.errors import UserError

from .rules import ignored_ids

MAX_MODULES = 200
MAX_FILE_BYTES = 2 * 2**20
MAX_DEPTH = 400
"""Levels of a syntax tree; the checks recurse, and generated code may have thousands."""


@dataclass
class Module:
    """One file: `name` is its dotted name in the project, `aliases` what its imports bind."""

    path: Path
    name: str
    tree: ast.Module
    aliases: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    ignores: dict[int, set[str]] = field(default_factory=dict)
    """Line -> IDs that a comment of the line silences."""

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass
class Unreadable:
    """A file that is not valid Python."""

    path: Path
    line: int
    column: int
    why: str


@dataclass
class Project:
    modules: dict[str, Module]
    unreadable: list[Unreadable]
    skipped: int = 0
    """Files beyond a bound."""

    def resolve(self, module: Module, node: ast.expr) -> str:
        """The full name of a dotted expression, such as torch.distributed.all_reduce; "" for
        anything else and for local variables."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        first = module.aliases.get(node.id)
        if first is None and module.stars and not parts:
            return self._star_name(module, node.id)
        return self.canonical(".".join([first, *reversed(parts)])) if first else ""

    def canonical(self, dotted: str) -> str:
        """The name behind re-exports of the project's modules."""
        for _ in range(8):
            owner, _dot, rest = self._split(dotted)
            if owner is None or not rest:
                return dotted
            head, dot, tail = rest.partition(".")
            target = owner.aliases.get(head)
            if target is None or target + dot + tail == dotted:
                return dotted
            dotted = target + dot + tail
        return dotted

    def _split(self, dotted: str) -> tuple[Module | None, str, str]:
        """The longest module of the project that the name begins with, and the rest."""
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            if module := self.modules.get(".".join(parts[:count])):
                return module, ".", ".".join(parts[count:])
        return None, "", dotted

    def _star_name(self, module: Module, name: str) -> str:
        for star in module.stars:
            owner = self.modules.get(star)
            if owner is None and star.startswith("torch"):
                return f"{star}.{name}"
            if owner is not None and name in owner.aliases:
                return owner.aliases[name]
        return ""

    def imports(self, *packages: str) -> bool:
        """True if any module imports one of these packages, or a part of it."""
        return any(
            target == package or target.startswith(package + ".")
            for module in self.modules.values()
            for target in (*module.aliases.values(), *module.stars)
            for package in packages
        )

    def has_text(self, text: str) -> bool:
        """True if any module has this string, such as the name of a variable that it reads."""
        return any(
            isinstance(node, ast.Constant) and node.value == text
            for module in self.modules.values()
            for node in ast.walk(module.tree)
        )


def read_text(path: Path) -> str:
    """Raises UserError for a file that cannot be read as Python text."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            got = f"{path.stat().st_size} bytes"
            raise UserError.of(str(path), got, f"at most {MAX_FILE_BYTES} bytes")
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError.of(
            str(path), f"a file that cannot be read ({why})", "a Python file"
        ) from None


def parse(path: Path, name: str, text: str) -> Module | Unreadable:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code, such as an invalid escape
            tree = ast.parse(text)
    except SyntaxError as error:
        return Unreadable(path, error.lineno or 1, error.offset or 1, error.msg)
    except (ValueError, RecursionError, MemoryError) as error:
        return Unreadable(path, 1, 1, str(error) or "too deeply nested")
    module = Module(path, name, tree, ignores=_ignores(text))
    _bind(module)
    return module


def _depth(tree: ast.AST) -> int:
    """Levels of a syntax tree."""
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _ignores(text: str) -> dict[int, set[str]]:
    if "holdfast:" not in text:
        return {}
    return {
        token.start[0]: ids
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and (ids := ignored_ids(token.string))
    }


def _bind(module: Module) -> None:
    """Fill `aliases` with the imports at any depth, functions and classes of the module, and names
    that are assigned once to another name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                module.aliases[name.asname or top] = name.name if name.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for name in node.names:
                if name.name == "*":
                    module.stars.append(base)
                else:
                    module.aliases[name.asname or name.name] = f"{base}.{name.name}"
    for statement in module.tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            module.aliases.setdefault(statement.name, f"{module.name}.{statement.name}")
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                dotted = Project({}, []).resolve(module, value)
                if dotted:
                    module.aliases.setdefault(target.id, dotted)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".") if module.package else []
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, node.module] if node.module else parts)


def load(main: Path, roots: list[Path], name: str = "__main__") -> Project:
    """The script `main` and what it imports, directly or not, from the directories `roots`.

    Raises UserError if the script itself cannot be read.
    """
    project = Project({}, [])
    waiting = [(name, main)]
    seen = {main.resolve()}
    while waiting:
        dotted, path = waiting.pop(0)
        try:
            parsed = parse(path, dotted, read_text(path))
        except UserError:
            if path == main:
                raise
            project.skipped += 1
            continue
        if isinstance(parsed, Unreadable):
            project.unreadable.append(parsed)
            continue
        if _depth(parsed.tree) > MAX_DEPTH:
            project.skipped += 1
            continue
        project.modules[dotted] = parsed
        for wanted, module in _imported(parsed, roots):
            if module.resolve() in seen:
                continue
            if len(seen) >= MAX_MODULES:
                project.skipped += 1
                continue
            seen.add(module.resolve())
            waiting.append((wanted, module))
    return project


def _imported(module: Module, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of the imports that are files below one of the roots."""
    wanted: list[str] = list(module.stars)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            wanted += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            wanted += [f"{base}.{name.name}".strip(".") for name in node.names] + [base]
    for dotted in dict.fromkeys(wanted):
        parts = dotted.split(".")
        for count in range(1, len(parts) + 1):
            for root in roots:
                place = root.joinpath(*parts[:count])
                for file in (place.with_suffix(".py"), place / "__init__.py"):
                    if all(parts[:count]) and file.is_file():
                        yield ".".join(parts[:count]), file
