"""Puts the packages of `spec.environment` before those of Holdfast's own Python, in a worker.

The environment is of the same Python, so a forked worker keeps its imports. Only where a package of
the environment takes the place of one that was imported already (another numpy, say), the worker
starts again in the environment's own interpreter.
"""

from __future__ import annotations

import importlib
import site
import sys
import sysconfig
from pathlib import Path


def enter(environment: Path) -> bool:
    """Change this process's path; False: it cannot be changed any more, and was not."""
    place = packages_of(environment)
    provided = {entry.name.partition(".")[0] for entry in place.iterdir()}
    # By the names of packages too: the modules of one that is installed with -e are elsewhere.
    provided |= {entry.name.partition("-")[0] for entry in place.glob("*.dist-info")}
    if provided & {name.partition(".")[0] for name in list(sys.modules)}:
        return False
    before = list(sys.path)
    site.addsitedir(str(place))
    added = [entry for entry in sys.path if entry not in before]
    ours = sysconfig.get_path("purelib")
    at = before.index(ours) if ours in before else len(before)
    sys.path[:] = [*before[:at], *added, *before[at:]]
    importlib.invalidate_caches()
    return True


def packages_of(environment: Path) -> Path:
    """Its site-packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"
