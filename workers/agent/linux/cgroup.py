"""What the control groups of this process allow, version 1 and version 2: a container's limits.

Owns: finding our groups and reading them. Must not: change them.

Without these a node of 4 cores and 16 GiB on a machine of 128 and 1 TiB would take all of it for
its own. Limits of groups above ours hold too, as far as they can be seen: in a container one
usually sees no further than its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60
"""Version 1 says `no limit` with a number near 2**63."""


@dataclass(frozen=True)
class CgroupDirectory:
    """A group in one hierarchy."""

    version: int
    top: Path
    directory: Path

    def upwards(self) -> Iterator[Path]:
        """Our group, the one around it, and so on."""
        yield self.directory
        if self.directory != self.top:
            yield from (p for p in self.directory.parents if p == self.top or self.top in p.parents)


def find(controller: str, proc: Path = Path("/proc/self")) -> CgroupDirectory | None:
    """Where a controller (`memory`, `cpu`) is in force for this process."""
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
        """Where a group of /proc/self/cgroup is below the mount point. What is mounted is often
        the container's own group, and then everything above it is out of sight."""
        below = path.removeprefix(self.root.rstrip("/")).lstrip("/")
        found = self.point / below
        return found if found.is_dir() else self.point


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


# -- what they allow --------------------------------------------------------------------------
def memory_limit_bytes(place: CgroupDirectory | None) -> int | None:
    """None: there is no limit."""
    if place is None:
        return None
    name = "memory.max" if place.version == 2 else "memory.limit_in_bytes"
    least = _least(place, lambda group: _limit((group / name).read_text()))
    return None if least is None else int(least)


def cpu_limit(place: CgroupDirectory | None) -> float | None:
    """Cores' worth of time per second; None: as many as there are."""
    if place is None:
        return None

    def of(group: Path) -> float | None:
        if place.version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        cores = _limit(quota)
        return None if cores is None else cores / int(period)

    return _least(place, of)


def memory_kills(place: CgroupDirectory | None) -> int:
    """How often the kernel killed in our group because its memory ran out; 0 where that cannot be
    read."""
    if place is None:
        return 0
    name = "memory.events" if place.version == 2 else "memory.oom_control"
    try:
        lines = (place.directory / name).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _limit(text: str) -> int | None:
    text = text.strip()
    if text == "max" or text.startswith("-") or int(text) >= UNLIMITED:
        return None
    return int(text)


def _least(place: CgroupDirectory, of: Callable[[Path], float | None]) -> float | None:
    found = []
    for group in place.upwards():
        try:
            limit = of(group)
        except (OSError, ValueError):
            continue  # the topmost group has no limits, and controllers need not be everywhere
        if limit is not None:
            found.append(limit)
    return min(found, default=None)
