"""Calls of a function and their conditions: branches, early exits, loops, except blocks. What a
condition means is decided elsewhere; here every `if` is kept.

Nested functions and methods are functions of their own: defining one does not call it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .source import Module, Project

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_EXIT_CALLS = ("sys.exit", "os._exit")


@dataclass(frozen=True)
class Guard:
    """A condition under which code runs: `test` is true, or false if not `positive`. `leaves` is
    the word of an earlier statement that makes the other ranks leave, "" for a branch."""

    test: ast.expr
    positive: bool
    line: int
    leaves: str = ""

    @property
    def key(self) -> tuple[str, bool]:
        test, positive = self.test, self.positive
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, positive = test.operand, not positive
        return ast.dump(test), positive


class Context(NamedTuple):
    guards: tuple[Guard, ...] = ()
    loops: tuple[ast.For | ast.AsyncFor | ast.While, ...] = ()
    managers: tuple[ast.expr, ...] = ()
    in_except: bool = False

    def under(self, *guards: Guard) -> Context:
        return self._replace(guards=(*self.guards, *guards))


@dataclass
class Site:
    """One call. `name` is its full name, "" for a method of a value; `method` its last part."""

    call: ast.Call
    name: str
    function: Function
    context: Context

    @property
    def method(self) -> str:
        called = self.call.func
        if isinstance(called, ast.Attribute):
            return called.attr
        return called.id if isinstance(called, ast.Name) else ""

    @property
    def last(self) -> str:
        """The last part of the full name, of which `method` may be an alias."""
        return self.name.rpartition(".")[2] or self.method

    @property
    def receiver(self) -> ast.expr | None:
        return self.call.func.value if isinstance(self.call.func, ast.Attribute) else None

    def argument(self, name: str, position: int | None = None) -> ast.expr | None:
        for keyword in self.call.keywords:
            if keyword.arg == name:
                return keyword.value
        arguments = self.call.args
        if position is not None and position < len(arguments):
            value = arguments[position]
            return None if isinstance(value, ast.Starred) else value
        return None

    def is_true(self, name: str) -> bool:
        value = self.argument(name)
        return isinstance(value, ast.Constant) and value.value is True

    @property
    def forwards_keywords(self) -> bool:
        return any(keyword.arg is None for keyword in self.call.keywords)


class Binding(NamedTuple):
    """`target = value`; `place` is the place in a tuple of targets, None for the value itself."""

    target: ast.expr
    value: ast.expr
    place: int | None
    context: Context
    is_loop: bool = False


@dataclass
class Function:
    """A function, or the top level of a module (`node` is then the module's tree)."""

    module: Module
    node: FunctionNode | ast.Module
    name: str
    class_name: str = ""
    parent: Function | None = None
    sites: list[Site] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    returns: list[ast.expr] = field(default_factory=list)
    nested: dict[str, Function] = field(default_factory=dict)

    @property
    def scopes(self) -> list[Function]:
        """The function and those around it, the innermost first."""
        return [self, *(self.parent.scopes if self.parent is not None else ())]

    @property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.Module):
            return []
        arguments = self.node.args
        return [a.arg for a in (*arguments.posonlyargs, *arguments.args)]

    @property
    def all_parameters(self) -> set[str]:
        if isinstance(self.node, ast.Module):
            return set()
        return {*self.parameters, *(a.arg for a in self.node.args.kwonlyargs)}

    @property
    def is_method(self) -> bool:
        return bool(self.class_name) and self.parameters[:1] in (["self"], ["cls"])


def functions(project: Project) -> list[Function]:
    """Every function of the project with its calls, the top levels of modules first."""
    all_functions: list[Function] = []
    for module in project.modules.values():
        top = Function(module, module.tree, module.name)
        all_functions.append(top)
        _Walker(project, top, all_functions).run(module.tree.body)
    return all_functions


class _Walker:
    """Fills one function, and makes those that are defined inside it."""

    def __init__(self, project: Project, function: Function, made: list[Function]) -> None:
        self._project, self._function, self._made = project, function, made

    def run(self, body: list[ast.stmt]) -> None:
        self._block(body, Context())

    def _block(self, body: list[ast.stmt], context: Context) -> list[Guard]:
        """Returns the guards that early exits inside put on what follows the block."""
        left: list[Guard] = []
        for statement in body:
            new = self._statement(statement, context.under(*left))
            left += [guard for guard in new if guard not in left]
        return left

    def _statement(self, node: ast.stmt, context: Context) -> list[Guard]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node, self._function.class_name)
            case ast.ClassDef():
                self._class(node)
            case ast.If():
                return self._if(node, context)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, context)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, context)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, item.context_expr, context)
                managers = (*context.managers, *(item.context_expr for item in node.items))
                return self._block(node.body, context._replace(managers=managers))
            case ast.Try() | ast.TryStar():
                return self._try(node, context)
            case ast.Match():
                return self._match(node, context)
            case _:
                self._simple(node, context)
        return []

    def _simple(self, node: ast.stmt, context: Context) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, context)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._bind(node.target, node.value, context)
        elif isinstance(node, ast.Return) and node.value is not None:
            self._function.returns.append(node.value)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, context)

    def _define(self, node: FunctionNode, class_name: str) -> None:
        outer = self._function
        inner = Function(outer.module, node, f"{outer.name}.{node.name}", class_name, outer)
        outer.nested[node.name] = inner
        self._made.append(inner)
        for value in (*node.decorator_list, *node.args.defaults):
            self._expression(value, Context())
        _Walker(self._project, inner, self._made).run(node.body)

    def _class(self, node: ast.ClassDef) -> None:
        """The body of a class runs where it stands; its name is part of its methods' names."""
        inner = replace(self._function, name=f"{self._function.name}.{node.name}", nested={})
        inner.class_name = node.name
        walker = _Walker(self._project, inner, self._made)
        walker.run(node.body)
        for method in inner.nested.values():
            method.parent = self._function

    def _if(self, node: ast.If, context: Context) -> list[Guard]:
        self._expression(node.test, context)
        yes, no = Guard(node.test, True, node.lineno), Guard(node.test, False, node.lineno)
        left = self._block(node.body, context.under(yes))
        left += self._block(node.orelse, context.under(no))
        first, second = self._leaves(node.body), self._leaves(node.orelse)
        if first and not second:
            left.append(replace(no, leaves=first[0], line=first[1]))
        elif second and not first:
            left.append(replace(yes, leaves=second[0], line=second[1]))
        return left

    def _leaves(self, body: list[ast.stmt]) -> tuple[str, int] | None:
        """(word, line) if the block ends with return, continue, break or an exit of the process."""
        if not body:
            return None
        last = body[-1]
        if isinstance(last, (ast.Return, ast.Continue, ast.Break)):
            return type(last).__name__.lower(), last.lineno
        if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
            name = self._project.resolve(self._function.module, last.value.func)
            if name in _EXIT_CALLS or ast.unparse(last.value.func) in ("exit", "quit"):
                return "exit", last.lineno
        return None

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, context: Context) -> list[Guard]:
        inner = context._replace(loops=(*context.loops, node))
        if isinstance(node, ast.While):
            self._expression(node.test, context)
            inner = inner.under(Guard(node.test, True, node.lineno))
        else:
            self._expression(node.iter, context)
            self._bind(node.target, node.iter, context, is_loop=True)
        left = self._block(node.body, inner)
        left += self._block(node.orelse, context)
        return [guard for guard in left if guard.leaves in ("return", "exit")]

    def _try(self, node: ast.Try | ast.TryStar, context: Context) -> list[Guard]:
        left = self._block(node.body, context)
        left += self._block(node.orelse, context.under(*left))
        for handler in node.handlers:
            self._block(handler.body, context._replace(in_except=True))
        left += self._block(node.finalbody, context)
        return left

    def _match(self, node: ast.Match, context: Context) -> list[Guard]:
        self._expression(node.subject, context)
        left: list[Guard] = []
        for case in node.cases:
            test = ast.Compare(node.subject, [ast.Eq()], [ast.Constant(ast.dump(case.pattern))])
            left += self._block(case.body, context.under(Guard(test, True, node.lineno)))
        return left

    def _bind(
        self, target: ast.expr, value: ast.expr, context: Context, is_loop: bool = False
    ) -> None:
        if not isinstance(target, (ast.Tuple, ast.List)):
            self._function.bindings.append(Binding(target, value, None, context, is_loop))
            return
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for index, part in enumerate(target.elts):
            if same and isinstance(value, (ast.Tuple, ast.List)):
                self._bind(part, value.elts[index], context, is_loop)
            else:
                self._function.bindings.append(Binding(part, value, index, context, is_loop))

    def _expression(self, node: ast.expr, context: Context) -> None:
        match node:
            case ast.Lambda():
                return
            case ast.IfExp():
                self._expression(node.test, context)
                for value, positive in ((node.body, True), (node.orelse, False)):
                    guard = Guard(node.test, positive, node.lineno)
                    self._expression(value, context.under(guard))
                return
            case ast.BoolOp():
                for value in node.values:
                    self._expression(value, context)
                    positive = isinstance(node.op, ast.And)
                    context = context.under(Guard(value, positive, node.lineno))
                return
            case ast.Call():
                name = self._project.resolve(self._function.module, node.func)
                self._function.sites.append(Site(node, name, self._function, context))
        for child in ast.iter_child_nodes(node):
            for inner in _expressions(child):
                self._expression(inner, context)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The node, or the nearest expressions below it: keywords and comprehensions are none."""
    if isinstance(node, ast.expr):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _expressions(child)
