"""The mutants of a Python module: one small change each, as a careless edit would make it.

A comparison is moved by one or inverted, `and` and `or` are swapped, a `not` is removed, a branch
is forced, a call or an assignment to an attribute is deleted, a returned boolean is flipped.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    module: str
    function: str
    line: int
    change: str
    """`before -> after`"""
    number: int
    """Number of the change in its module."""
    lines: range
    """Changed lines; a test that executes none of them cannot notice the change."""
    function_lines: range
    source: str
    """Source of the whole module, unchanged."""

    @property
    def name(self) -> str:
        """Name without the line, so that it stays the same when other code changes."""
        return f"{self.module}:{self.function}: {self.change}"

    def code(self, path: str) -> CodeType:
        """Code of the changed function."""
        code = compile(_changed(self.source, self.number), path, "exec")
        for name in self.function.split("."):
            found = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
            assert len(found) == 1, f"{len(found)} {name} in {self.module}"
            code = found[0]
        return code


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants inside functions, in the order of the source."""
    found: list[Mutant] = []
    seen: dict[str, int] = {}
    for number, (function, top, node, after) in enumerate(_changes(ast.parse(source))):
        change = f"{_short(node)} -> {_short(after) if after is not None else 'deleted'}"
        key = f"{function}: {change}"
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            change += f" (#{seen[key]})"
        where = node.test if isinstance(node, ast.If) else node
        found.append(
            Mutant(
                module, function, node.lineno, change, number, _lines(where), _lines(top), source
            )
        )
    return found


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _changed(source: str, number: int) -> ast.Module:
    """The module with its change of this number."""
    tree = ast.parse(source)
    _function, _top, node, after = next(
        change for index, change in enumerate(_changes(tree)) if index == number
    )
    replacement = after if after is not None else ast.copy_location(ast.Pass(), node)
    changed = ast.fix_missing_locations(_Replace(node, replacement).visit(tree))
    assert isinstance(changed, ast.Module)
    return changed


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._old:
            return ast.copy_location(self._new, node)
        return self.generic_visit(node)


def _changes(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef, ast.expr | ast.stmt, ast.AST | None]]:
    """(its name, function, node, what replaces it; None: it is deleted)"""
    for function, top in _functions(tree):
        for node in _nodes(top):
            for after in _of(node):
                assert isinstance(node, ast.expr | ast.stmt)
                yield function, top, node, after


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _nodes(top: ast.AST) -> Iterator[ast.AST]:
    """Nodes without assertions, which only guard against bugs of the core itself."""
    yield top
    for child in ast.iter_child_nodes(top):
        if not isinstance(child, ast.Assert):
            yield from _nodes(child)


def _of(node: ast.AST) -> Iterator[ast.AST | None]:
    match node:
        case ast.Compare(ops=[op]):
            for table in (BOUNDARY, INVERSE):
                if type(op) in table:
                    after = copy.copy(node)
                    after.ops = [table[type(op)]()]
                    yield after
        case ast.BoolOp():
            after_bool = copy.copy(node)
            after_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield after_bool
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.If() | ast.IfExp():
            for value in (True, False):
                after_if = copy.copy(node)
                after_if.test = ast.Constant(value)
                yield after_if
        case ast.Expr(value=ast.Call()):
            yield None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield None
        case ast.AugAssign():
            yield None
        case ast.Return(value=ast.Constant(value=bool() as value)):
            yield ast.Return(ast.Constant(not value))
        case _:
            return
