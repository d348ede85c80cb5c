"""The environment of this process: what a container may lack, and what the job's spec adds.

Owns: a user with a name and a home for workers to inherit; spec.env for drivers of stores, which
agents of a machine host have from their start and stand-alone ones only when they know their job.
Must not: know jobs.
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


def adopt(more: Mapping[str, str]) -> None:
    """The job's own variables, over this process' environment and for fsspec, which reads its
    FSSPEC_* once, when it is imported. Later imports see them by themselves."""
    os.environ.update(more)
    ours = {name: value for name, value in more.items() if name.startswith("FSSPEC_")}
    config = sys.modules.get("fsspec.config")
    if ours and config is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are not like that; they say nothing
            config.set_conf_env(config.conf, ours)
