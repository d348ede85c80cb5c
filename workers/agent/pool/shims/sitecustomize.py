"""First on the PYTHONPATH of a rank: each Python that a rank starts runs this file before anything
else. A Python that is a launcher (`torchrun`, `python -m torch.distributed.run`) becomes
launcher_shim.py; any other one goes on with the sitecustomize that it would have had.

Python 3.8 and later run it, with or without Holdfast.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_POOL = os.path.dirname(_HERE)
_NAMES = os.path.join(_POOL, "..", "..", "..", "orchestrator", "api", "launcher_names.py")


def _load(spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _become_the_script() -> None:
    """Run the script instead of the launcher, in a rank only: without RANK a launcher is itself."""
    holdfast_python = os.environ.get("HOLDFAST_PYTHON")
    if "RANK" not in os.environ or not holdfast_python or not sys.executable:
        return
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    names = _load(importlib.util.spec_from_file_location("_holdfast_launcher_names", _NAMES))
    program = names.python_program(words)[2]
    if names.launched(program)[0] in names.REPLACED:
        shim = os.path.join(_POOL, "launcher_shim.py")
        os.execv(holdfast_python, [holdfast_python, "-P", shim, sys.executable, *program])


def _go_on() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        _load(spec)


_become_the_script()
_go_on()
