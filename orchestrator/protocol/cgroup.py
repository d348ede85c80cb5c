"""The limits of this process's control groups, version 1 and 2: CPU and memory of a container.

Without them a node of 4 cores and 16 GiB on a machine with 128 cores and 1 TiB would count on all
of it. Limits of the parent groups apply too; a container usually sees only its own group. Version 1
is kept because gVisor and older distributions still have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60
"""Version 1 shows `no limit` as a number near 2**63."""


@dataclass(frozen=True)
class CgroupDirectory:
    """A group in one hierarchy."""

    version: int
    top: Path
    directory: Path

    def upwards(self) -> Iterator[Path]:
        """This group, then its parents."""
        yield self.directory
        if self.directory != self.top:
            yield from (p for p in self.directory.parents if p == self.top or self.top in p.parents)


def find(controller: str, proc: Path = Path("/proc/self")) -> CgroupDirectory | None:
    """The group of this process for a controller (`memory`, `cpu`)."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except (OSError, ValueError):
        return None
    for version in (1, 2):
        for _number, names, path in groups:
            if (controller in names.split(",")) if version == 1 else not names:
                for mount in mounts:
                    if mount.version == version and (version == 2 or controller in mount.options):
                        return CgroupDirectory(version, mount.point, mount.locate(path))
    return None


@dataclass(frozen=True)
class _Mount:
    version: int
    root: str
    point: Path
    options: list[str]

    def locate(self, path: str) -> Path:
        """The directory of a group of /proc/self/cgroup. Often only the container's own group is
        mounted, and its parents are not visible."""
        below = path.removeprefix(self.root.rstrip("/")).lstrip("/")
        directory = self.point / below
        return directory if directory.is_dir() else self.point


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """Field numbers as in proc(5): 4 root, 5 mount point; after a dash the type, source, options
    of the super block."""
    for line in mountinfo.splitlines():
        left, _dash, right = line.partition(" - ")
        kind, _source, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            version = 2 if kind == "cgroup2" else 1
            yield _Mount(version, fields[3], Path(fields[4]), options.split(","))


# -- limits -----------------------------------------------------------------------------------
def memory_limit_bytes(group: CgroupDirectory | None) -> int | None:
    """None: no limit."""
    if group is None:
        return None
    name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    least = _least(group, lambda path: _limit((path / name).read_text()))
    return None if least is None else int(least)


def memory_available_bytes(group: CgroupDirectory | None) -> int | None:
    """Memory that the limits leave; None: no limit. Pages of files count as free: the kernel takes
    them back before it kills. Memory files (memfd) do not."""
    if group is None:
        return None
    v2 = group.version == 2
    limit = "memory.max" if v2 else "memory.limit_in_bytes"
    usage = "memory.current" if v2 else "memory.usage_in_bytes"
    prefix = "" if v2 else "total_"

    def of(path: Path) -> float | None:
        most = _limit((path / limit).read_text())
        if most is None:
            return None
        stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, most - max(0, int((path / usage).read_text()) - files))

    left = _least(group, of)
    return None if left is None else int(left)


def cpu_limit(group: CgroupDirectory | None) -> float | None:
    """CPU quota in cores; None: no limit."""
    if group is None:
        return None

    def of(path: Path) -> float | None:
        if group.version == 2:
            quota, period = (path / "cpu.max").read_text().split()
        else:
            quota = (path / "cpu.cfs_quota_us").read_text()
            period = (path / "cpu.cfs_period_us").read_text()
        cores = _limit(quota)
        return None if cores is None else cores / int(period)

    return _least(group, of)


def memory_kills(group: CgroupDirectory | None) -> int:
    """Number of processes of the group that the kernel killed for lack of memory; 0 if unknown."""
    if group is None:
        return 0
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    try:
        lines = (group.directory / name).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _limit(text: str) -> int | None:
    text = text.strip()
    if text == "max" or text.startswith("-") or int(text) >= UNLIMITED:
        return None
    return int(text)


def _least(group: CgroupDirectory, of: Callable[[Path], float | None]) -> float | None:
    bounds = []
    for path in group.upwards():
        try:
            limit = of(path)
        except (OSError, ValueError):
            continue  # the root group has no limits, and not every group has every controller
        if limit is not None:
            bounds.append(limit)
    return min(bounds, default=None)
