"""Makes a script of a Python function: its source, that of the functions and classes that it refers
to, the imports that they use, and the values of plain globals.

Source and no pickle: the script is a file that a person can read, its tracebacks show lines, it
runs under another Python as well, and the core needs no package for it. What has no source or no
literal is refused by name; the function can make such an object itself.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Problem, UserError

_CO_FUTURE_ANNOTATIONS = 0x1000000
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def write_script(
    directory: Path,
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Sequence[str] = (),
) -> Path:
    """Write a script that calls the function with these arguments, after the lines `before`, and
    return its path. Raises UserError for what cannot be written as source."""
    if not isinstance(function, types.FunctionType):
        raise _refused(f"{function!r}", "a function", "call the object in a function")
    source = _Source()
    source.add_function("job", function)
    call = [_literal(f"args[{number}]", value) for number, value in enumerate(args)]
    call += [f"{name}={_literal(f'kwargs[{name!r}]', value)}" for name, value in kwargs.items()]
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        expected = f"those of {function.__name__}{inspect.signature(function)}"
        raise _refused(f"arguments with {error}", expected, "", "args") from None
    # Not the function's name: a random.py would stand before the standard library's.
    path = directory / f"run_{function.__name__}.py"
    main = [*before, f"{function.__name__}({', '.join(call)})"]
    lines = [*source.lines(), 'if __name__ == "__main__":', *(f"    {line}" for line in main)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class _Source:
    """The parts of a script, each name once."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        """Name in the script -> its object."""
        self._imports: list[str] = []
        self._values: list[str] = []
        self._definitions: list[str] = []
        self._future = False

    def lines(self) -> Iterator[str]:
        yield f'"""Made by holdfast.Client of {", ".join(self._shipped())}."""'
        if self._future:
            yield "from __future__ import annotations"
        yield from sorted(self._imports)
        yield from self._values
        for text in self._definitions:
            yield f"\n\n{text}"
        yield "\n"

    def _shipped(self) -> list[str]:
        return [name for name, one in self._names.items() if hasattr(one, "__qualname__")]

    def add_function(self, field: str, function: types.FunctionType) -> None:
        name = function.__name__
        inner = inspect.unwrap(function)
        if name == "<lambda>":
            raise _refused("a lambda", "a function that is defined with def", "", field)
        if free := inner.__code__.co_freevars:
            got = f"{name}, a closure over {', '.join(free)}"
            fix = "make it a parameter, and give its value in args or kwargs"
            raise _refused(got, "a function without variables of an outer function", fix, field)
        owner = inner.__qualname__.rpartition(".")[0]
        if owner and not owner.endswith("<locals>"):
            raise _refused(f"{inner.__qualname__}, a method", "a function", "", field)
        self._define(field, name, inner, inner.__globals__)

    def _define(self, field: str, name: str, one: Any, namespace: Mapping[str, Any]) -> None:
        if not self._is_new(field, name, one):
            return
        try:
            text = textwrap.dedent(_source_of(one))
        except (OSError, TypeError):
            got = f"{name}, whose source is not known"
            fix = "define it in a file or a notebook"
            raise _refused(got, "a function or class with source", fix, field) from None
        codes = [method.__code__ for method in _functions(one)]
        self._future |= any(code.co_flags & _CO_FUTURE_ANNOTATIONS for code in codes)
        for used in _globals_of(text):
            if used in namespace:
                self._add(f"{name}: {used}", used, namespace[used])
                if isinstance(namespace[used], types.ModuleType):
                    self._import_submodules(text, used, namespace[used].__name__)
        self._definitions.append(text.rstrip())

    def _is_new(self, field: str, name: str, one: Any) -> bool:
        if name not in self._names:
            self._names[name] = one
            return True
        if self._names[name] is not one and self._names[name] != one:
            got = f"two objects with the name {name}"
            raise _refused(got, "one object for each name", "rename one of them", field)
        return False

    def _add(self, field: str, name: str, one: Any) -> None:
        """An object that the source refers to by this name."""
        if getattr(builtins, name, None) is one:
            return
        if isinstance(one, types.ModuleType):
            if self._is_new(field, name, one):
                self._import(field, one.__name__, f"import {one.__name__} as {name}")
            return
        own = getattr(one, "__name__", None)
        if isinstance(own, str) and (module := _installed_home(one, own)):
            if self._is_new(field, name, one):
                self._imports.append(f"from {module} import {own} as {name}")
            return
        if isinstance(one, type) and own == name:
            self._define(field, name, one, vars(sys.modules.get(one.__module__, builtins)))
        elif isinstance(one, types.FunctionType) and own == name:
            self.add_function(field, one)
        elif self._is_new(field, name, one):
            self._values.append(f"{name} = {_literal(field, one)}")

    def _import(self, field: str, module: str, text: str) -> None:
        if not _is_installed(module):
            got = f"the module {module}, which is not installed"
            fix = "submit a script beside it, or install it"
            raise _refused(got, "a module that the workers can import", fix, field)
        self._imports.append(text)

    def _import_submodules(self, text: str, name: str, module: str) -> None:
        """Those that the source reaches from a module: `import ray` alone has no ray.train."""
        for node in ast.walk(ast.parse(text)):
            parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
            full = ".".join([module, *parts[1:]])
            if parts[0] == name and full in sys.modules:
                line = f"import {full}"
                if line not in self._imports:
                    self._imports.append(line)


def _is_installed(module: str) -> bool:
    """Whether every Python of this environment can import it."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "holdfast":
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    paths = [file] if file else list(getattr(sys.modules.get(top), "__path__", ()))
    return any(str(path).startswith(_INSTALLED) for path in paths)


def _installed_home(one: Any, name: str) -> str | None:
    """An installed module from which the object can be imported by its own name."""
    module = getattr(one, "__module__", None)
    if module is None:  # of C code: torch.randn
        names = [key for key, found in list(sys.modules.items()) if vars(found).get(name) is one]
        return next(iter(sorted(filter(_is_installed, names), key=len)), None)
    if not isinstance(module, str) or not _is_installed(module):
        return None
    return module if getattr(sys.modules.get(module), name, None) is one else None


def _functions(one: Any) -> list[types.FunctionType]:
    """The function itself, or the methods of a class."""
    found = vars(one).values() if isinstance(one, type) else [one]
    return [part for part in found if isinstance(part, types.FunctionType)]


def _source_of(one: Any) -> str:
    """Raises OSError and TypeError."""
    if not isinstance(one, type):
        return inspect.getsource(one)
    try:
        return inspect.getsource(one)
    except (OSError, TypeError):  # of a notebook: its modules have no files, but its cells do
        for method in _functions(one):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(ast.parse("".join(lines))):
                if not isinstance(node, ast.ClassDef) or node.name != one.__name__:
                    continue
                begin = min([node.lineno, *(line.lineno for line in node.decorator_list)])
                if begin <= method.__code__.co_firstlineno <= (node.end_lineno or 0):
                    return "".join(lines[begin - 1 : node.end_lineno])
        raise


def _globals_of(text: str) -> list[str]:
    """The names that this source reads from its module, in order of their first scope."""
    found: dict[str, None] = {}

    def look(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            is_outer = table.get_type() == "module"
            if symbol.is_referenced() and (is_outer or symbol.is_global()):
                found.setdefault(symbol.get_name())
        for child in table.get_children():
            look(child)

    look(symtable.symtable(text, "<function>", "exec"))
    return list(found)


def _literal(field: str, value: Any) -> str:
    """Source of a value that Python can read back. Raises UserError."""
    text = repr(value)
    try:
        found = ast.literal_eval(text)
        same = type(found) is type(value) and found == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        same = False
    if same:
        return text
    got = f"{text[:60]} ({type(value).__name__})"
    expected = "a number, a text, None, or a list, tuple, dict or set of them"
    raise _refused(got, expected, "make the object in the function", field)


def _refused(got: str, expected: str, fix: str, field: str = "job") -> UserError:
    return UserError(str(Problem(field, got, expected, fix)))
