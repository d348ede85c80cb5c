"""Completes the environment of this process: a user and a home directory, and spec.env.

Drivers of stores need spec.env. Agents of a node launcher have it from their start; stand-alone
agents get it with Welcome.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path


def complete(environment: MutableMapping[str, str]) -> None:
    """Set USER and a writable HOME if they are missing.

    In a container that runs as a uid without an entry in the password file, getpass.getuser()
    raises (caches of torch.compile call it) and the home is `/`, often on a read-only root.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["USER"] = f"uid-{os.getuid()}"
    if not os.access(environment.get("HOME", ""), os.W_OK):
        home = Path(tempfile.gettempdir()) / f"holdfast-home-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        environment["HOME"] = str(home)


def adopt(more: Mapping[str, str]) -> None:
    """Set the job's variables, in the environment and in fsspec, which reads FSSPEC_* only when it
    is imported."""
    os.environ.update(more)
    ours = {name: value for name, value in more.items() if name.startswith("FSSPEC_")}
    config = sys.modules.get("fsspec.config")
    if ours and config is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fsspec warns about malformed names
            config.set_conf_env(config.conf, ours)
