"""Command lines and PYTHONPATH for child processes that run a module of Holdfast.

Such a process often starts in the directory of a user's job, which `python -m` would put first on
the import path: a random.py beside the script would then replace the standard library's in an agent
or in `holdfast checkpoint`. The option -P leaves that directory out.
"""

from __future__ import annotations

import functools
import json
import os
import site
import sys
from pathlib import Path


def start(module: str) -> list[str]:
    """The command that runs a module of Holdfast; set PYTHONPATH to `import_path()`."""
    return [sys.executable, "-P", "-m", module]


def start_alike(module: str) -> list[str]:
    """The command that runs a module of Holdfast with this process's import path, for a child that
    inherits the environment."""
    return start(module) if sys.flags.safe_path else [sys.executable, "-m", module]


def import_path() -> str:
    """The PYTHONPATH with which a child finds this copy of Holdfast.

    An installed copy needs no entry. One that is run from a checkout without being installed does,
    and then the top-level folders of the checkout can be imported too.
    """
    root = Path(__file__).parents[3]
    entries = [] if _is_installed(root) else [str(root)]
    return os.pathsep.join([*entries, *filter(None, [os.environ.get("PYTHONPATH")])])


@functools.cache
def _is_installed(root: Path) -> bool:
    """True if every process of this interpreter can import the package `holdfast` in `root`: it is
    in site-packages, or an editable install (PEP 610) refers to it."""
    places = [Path(place) for place in (*site.getsitepackages(), site.getusersitepackages())]
    files = (file for place in places for file in place.glob("holdfast*-info/direct_url.json"))
    return root in places or any(
        origin.get("dir_info", {}).get("editable") and origin.get("url") == root.as_uri()
        for origin in (json.loads(file.read_text()) for file in files)
    )
