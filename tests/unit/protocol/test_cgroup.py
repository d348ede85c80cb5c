"""Limits of a container, from control groups of version 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.orchestrator.protocol import cgroup


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def proc(root: Path, groups: str, mounts: list[str]) -> Path:
    """A /proc/self with these groups and mounts."""
    tree(root, {"self/cgroup": groups, "self/mountinfo": "\n".join(mounts)})
    return root / "self"


def unified(root: Path, inside: str = "/") -> str:
    return f"30 23 0:26 {inside} {root}/fs rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_a_container_on_version_2_sees_its_own_limits(tmp_path: Path) -> None:
    files = {
        "fs/memory.max": "1073741824",
        "fs/cpu.max": "250000 100000",
        "fs/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2",
    }
    tree(tmp_path, files)
    where = proc(tmp_path, "0::/", [unified(tmp_path)])
    memory, cpu = cgroup.find("memory", where), cgroup.find("cpu", where)
    assert cgroup.memory_limit_bytes(memory) == 2**30
    assert cgroup.cpu_limit(cpu) == 2.5
    assert cgroup.memory_kills(memory) == 2


def test_the_smallest_limit_of_a_group_and_its_parents_applies(tmp_path: Path) -> None:
    files = {
        "fs/pods/memory.max": "5000",
        "fs/pods/one/memory.max": "max",
        "fs/pods/one/cpu.max": "max 100000",
    }
    tree(tmp_path, files)
    where = proc(tmp_path, "0::/pods/one", [unified(tmp_path)])
    assert cgroup.memory_limit_bytes(cgroup.find("memory", where)) == 5000
    assert cgroup.cpu_limit(cgroup.find("cpu", where)) is None


@pytest.mark.parametrize("inside", ["/kubepods/pod1/abc", "/"])
def test_on_version_1_the_group_is_found_below_the_visible_mount(
    tmp_path: Path, inside: str
) -> None:
    """The group itself is mounted, or the whole hierarchy of which only a part is visible."""
    files = {
        "fs/memory/memory.limit_in_bytes": "9663676416",
        "fs/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
        "fs/cpu/cpu.cfs_quota_us": "150000",
        "fs/cpu/cpu.cfs_period_us": "100000",
    }
    tree(tmp_path, files)
    mounts = [
        f"31 23 0:27 {inside} {tmp_path}/fs/memory ro - cgroup cgroup rw,memory",
        f"32 23 0:28 {inside} {tmp_path}/fs/cpu ro - cgroup cgroup rw,cpu,cpuacct",
        unified(tmp_path),
    ]
    groups = "9:memory:/kubepods/pod1/abc\n4:cpu,cpuacct:/kubepods/pod1/abc\n0::/"
    where = proc(tmp_path, groups, mounts)
    assert cgroup.memory_limit_bytes(cgroup.find("memory", where)) == 9663676416
    assert cgroup.cpu_limit(cgroup.find("cpu", where)) == 1.5
    assert cgroup.memory_kills(cgroup.find("memory", where)) == 1


def test_a_group_without_limits_has_none(tmp_path: Path) -> None:
    files = {
        "fs/memory.limit_in_bytes": "9223372036854771712",
        "fs/cpu.cfs_quota_us": "-1",
        "fs/cpu.cfs_period_us": "100000",
    }
    tree(tmp_path, files)
    mount = f"31 23 0:27 / {tmp_path}/fs rw - cgroup cgroup rw,memory,cpu"
    where = proc(tmp_path, "3:memory,cpu:/", [mount])
    assert cgroup.memory_limit_bytes(cgroup.find("memory", where)) is None
    assert cgroup.cpu_limit(cgroup.find("cpu", where)) is None


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cgroup.find("memory", tmp_path) is None
    assert cgroup.memory_limit_bytes(None) is None
    assert cgroup.cpu_limit(None) is None
    assert cgroup.memory_kills(None) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_limit_leaves_counts_pages_of_files_as_free(tmp_path: Path, version: int) -> None:
    """A memfd is on the anonymous lists, so it is never counted as free."""
    if version == 2:
        names = ("memory.max", "memory.current")
        stat = "anon 500\nfile 300\nshmem 100\nactive_file 50\ninactive_file 150"
        where = proc(tmp_path, "0::/", [unified(tmp_path)])
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        stat = "active_file 0\ntotal_active_file 50\ntotal_inactive_file 150\ntotal_shmem 100"
        mount = f"35 31 0:32 / {tmp_path}/fs rw - cgroup cgroup rw,memory"
        where = proc(tmp_path, "4:memory:/", [mount])
    tree(tmp_path, {f"fs/{names[0]}": "1000", f"fs/{names[1]}": "800", "fs/memory.stat": stat})
    assert cgroup.memory_available_bytes(cgroup.find("memory", where)) == 400


def test_without_a_limit_nothing_is_known_of_what_is_left(tmp_path: Path) -> None:
    tree(tmp_path, {"fs/memory.max": "max"})
    where = proc(tmp_path, "0::/", [unified(tmp_path)])
    assert cgroup.memory_available_bytes(cgroup.find("memory", where)) is None
