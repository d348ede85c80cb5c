"""What a container may lack and libraries take for granted: a user with a name, a home.

Owns: these two, in the environment that workers inherit. Must not: replace what is usable.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path


def complete(environment: MutableMapping[str, str]) -> None:
    """Give this process a USER and a writable HOME where it has none.

    A container that runs as a number without an entry in its password file makes getpass.getuser()
    raise (caches of torch.compile ask it) and has `/` as its home, often on a read-only root.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["USER"] = f"uid-{os.getuid()}"
    if not os.access(environment.get("HOME", ""), os.W_OK):
        home = Path(tempfile.gettempdir()) / f"holdfast-home-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        environment["HOME"] = str(home)
