"""How a Python of ours starts another one, and where that finds our code.

Owns: this, for each process of ours that begins with an interpreter of its own. Must not: start it.

Most begin in a directory that holds somebody's job, and `python -m` puts that first on its path: a
random.py beside a script would be run in place of the standard library's, inside of an agent or of
`holdfast checkpoint`. -P leaves the directory out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def start(module: str) -> list[str]:
    """The command that runs a module of ours. Give it `import_path` as PYTHONPATH."""
    return [sys.executable, "-P", "-m", module]


def start_alike(module: str) -> list[str]:
    """The command that runs a module of ours with the import path of this process, if its
    environment is handed on."""
    return start(module) if sys.flags.safe_path else [sys.executable, "-m", module]


def import_path() -> str:
    """PYTHONPATH with which this very code is found, be it installed or not."""
    source = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
