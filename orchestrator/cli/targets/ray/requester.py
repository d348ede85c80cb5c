"""Who asks, also where a command runs inside the cluster for somebody outside.

Owns: handing the name on, and what is taken of one. Must not: let anything depend on it; it is
shown, and nobody has checked it.
"""

from __future__ import annotations

import os
import shlex

from holdfast.orchestrator.cli.client import user

BY = "HOLDFAST_BY"
MOST_CHARS = 64
"""Room for a name; it is kept in the job's journal."""


def asks() -> str:
    """The name that came along, or this process's user."""
    name = os.environ.get(BY)
    return _taken(user() if name is None else name)


def handed_on(command: str) -> str:
    """A shell's command that is run for whoever asks here."""
    return f"{BY}={shlex.quote(asks())} {command}"


def _taken(name: str) -> str:
    """Nothing that moves a cursor, and no second line."""
    return "".join(filter(str.isprintable, name))[:MOST_CHARS]
