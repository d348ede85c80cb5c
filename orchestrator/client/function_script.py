"""Pickles a Python function with its arguments, and writes a script that loads and calls it.

Modules that are not installed are pickled by value, so the workers need no file of the user's. Only
the rank that runs the script loads the pickle: no process of Holdfast does.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from ..errors import UserError

_SCRIPT = '''\
"""Calls {name}, which holdfast.Client has pickled beside this file."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.version_info[:2] != {version}:
        sys.exit(
            "{name} was pickled by Python {python} and cannot be loaded by Python "
            f"{{sys.version_info[0]}}.{{sys.version_info[1]}}; expected the same minor version: "
            "submit the job from the workers' version, or submit a script"
        )
    function, args, kwargs = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''


def write_script(
    directory: Path,
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Sequence[str] = (),
) -> Path:
    """Write the script and its pickle, and return the script's path. The script runs the lines
    `before`, in which `function` is the function, ahead of the call. Raises UserError for what
    cannot be pickled."""
    title = function_title(function)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        expected = f"those of {title}{inspect.signature(function)}"
        raise _rejected("args", f"arguments with {error}", expected, "") from None
    except ValueError:
        pass  # a function of C code without a signature
    # Not the bare title: a random.py would stand before the standard library's.
    script = directory / f"run_{title}.py"
    script.with_suffix(".pickle").write_bytes(_pickled((function, tuple(args), dict(kwargs))))
    version = sys.version_info[:2]
    text = _SCRIPT.format(name=title, version=version, python=".".join(map(str, version)))
    lines = "".join(f"    {line}\n" for line in [*before, "function(*args, **kwargs)"])
    script.write_text(text + lines, encoding="utf-8")
    return script


def function_title(function: Callable[..., object]) -> str:
    """A name for the function that a file can have."""
    return re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "function"


def _pickled(call: tuple[Any, ...]) -> bytes:
    try:
        with _local_modules_by_value():
            return bytes(cloudpickle.dumps(call))
    except Exception as error:  # whatever the __reduce__ of a user's object raises
        got = f"an object that cannot be pickled ({error})"
        expected = "a function, globals and arguments that cloudpickle can pickle"
        raise _rejected("job", got, expected, "make the object in the function") from None


@contextmanager
def _local_modules_by_value() -> Iterator[None]:
    with ExitStack() as registered:
        for name, module in list(sys.modules.items()):
            has_pickle = name in cloudpickle.list_registry_pickle_by_value() or "." in name
            if not has_pickle and name == getattr(module, "__name__", "") and _is_local(module):
                cloudpickle.register_pickle_by_value(module)
                registered.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _is_local(module: object) -> bool:
    """True if the top-level module belongs to the user and is not installed for the workers."""
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    folders = {part for path in paths if path for part in Path(path).parts}
    is_installed = bool({"site-packages", "dist-packages"} & folders)
    own = {*sys.builtin_module_names, *sys.stdlib_module_names, "__main__", "holdfast"}
    return (
        isinstance(module, ModuleType)
        and bool(folders)
        and not is_installed
        and module.__name__ not in own
    )


def _rejected(field: str, got: str, expected: str, fix: str) -> UserError:
    return UserError.of(field, got, expected, fix)
