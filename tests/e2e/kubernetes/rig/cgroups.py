"""The cgroups of a run's nodes, below the cgroups of this process.

Only directories named after a run are touched. A node sees its own cgroup as the root (a cgroup
namespace), so its processes count against the limits of this process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
from pathlib import Path

from tests.e2e.kubernetes.rig.waiting import until

ROOT = Path("/sys/fs/cgroup")
PREFIX = "holdfast-rig-"
# These are empty in a new child, which accepts no process before they are set.
CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")


def hierarchies() -> dict[str, Path]:
    """Mount options -> the cgroup of this process, for every v1 hierarchy that is mounted."""
    mounted = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        kind = words[words.index("-") + 1]
        point = Path(words[4])
        if kind == "cgroup" and point.parent == ROOT:
            mounted[point] = set(words[-1].split(","))
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for point, options in mounted.items():
            if controllers and set(controllers.split(",")) <= options:
                found[controllers] = point / path.lstrip("/")
    return found


def make(run: str, node: str) -> dict[str, Path]:
    """Make the cgroup of a node in every hierarchy: mount options -> directory."""
    made = {}
    for hierarchy, parent in hierarchies().items():
        above = parent / f"{PREFIX}{run}"
        made[hierarchy] = above / node
        for directory in (above, made[hierarchy]):
            directory.mkdir(exist_ok=True)
            for name in CPUSET_FILES:
                file = directory / name
                if file.exists() and not file.read_text().strip():
                    file.write_text((directory.parent / name).read_text())
    return made


def of_run(run: str) -> list[Path]:
    """The top directories of a run, in whatever cgroup the process was that made them."""
    if not ROOT.is_dir():
        return []
    found = []
    for directory, names, _ in os.walk(ROOT):
        if f"{PREFIX}{run}" in names:
            found.append(Path(directory) / f"{PREFIX}{run}")
            names.clear()
    return found


def processes(run: str, node: str) -> list[int]:
    """The processes in the cgroups of a node, each once."""
    found: set[int] = set()
    for top in of_run(run):
        for file in (top / node).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # a cgroup that went away meanwhile
                found.update(int(pid) for pid in file.read_text().split())
    return sorted(found)


def remove(run: str, node: str | None = None) -> None:
    """Kill the processes in the cgroups of a run or of one node, and remove the cgroups."""
    for top in of_run(run):
        directory = top / node if node else top
        if directory.exists():
            until(functools.partial(_removed, directory), f"{directory} to be empty", timeout_s=20)


def _removed(top: Path) -> bool:
    for directory, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            for pid in (Path(directory) / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            Path(directory).rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
    return not top.exists()
