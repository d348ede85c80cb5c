"""A job's log files, which lie on the Ray nodes that wrote them, copied to where somebody reads.

Owns: fetching what is new. Must not: know what is in them; cli/log_files.py does.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

from . import cluster

MOST_BYTES = 8 << 20
"""Of one file at once."""
FETCH_TIMEOUT_S = 60.0

Part = tuple[str, str, bytes]
"""(identity of the file, path below the log directory, bytes from the asked offset)."""


class Which(NamedTuple):
    """The files whose content is wanted; of all others only the names are."""

    rank: int | None
    generation: int | None
    """None: the newest."""
    node: str | None
    """Its agent's, instead of workers'."""


def fetch(job: str, job_id: str, which: Which, offsets: dict[str, int], target: Path) -> bool:
    """Append what is new to the copies under `target`; `offsets` (identity -> bytes read) goes on
    from call to call. Returns whether there was anything. Nodes that do not answer are passed."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Several Ray nodes of one machine have the same files.
    machines = {str(one["NodeManagerHostname"]): key for key, one in cluster.alive_nodes().items()}
    # Through a Ray client (ray://) this process is on no machine of the cluster.
    inside = not ray.util.client.ray.is_connected()
    if inside:
        machines.pop(socket.gethostname(), None)
    # Twice a second while a log is followed: Ray's list of tasks would be full of it (see calls).
    look = ray.remote(num_cpus=0, max_retries=0, enable_task_events=False)(_read)
    asked = []
    for node in machines.values():
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked.append(look.options(scheduling_strategy=there).remote(job, job_id, which, offsets))
    parts = {part[0]: part for part in (_read(job, job_id, which, offsets) if inside else ())}
    for answer in _ready(asked):
        try:
            parts |= {part[0]: part for part in ray.get(answer)}
        except RayError:
            continue
    for identity, path, data in parts.values():
        offsets[identity] = offsets.get(identity, 0) + len(data)
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("ab") as file:
            file.write(data)
    return any(data for _identity, _path, data in parts.values())


def _ready(asked: list[Any]) -> list[Any]:
    import ray

    if not asked:
        return []
    ready, _late = ray.wait(asked, num_returns=len(asked), timeout=FETCH_TIMEOUT_S)
    return list(ready)


def _read(job: str, job_id: str, which: Which, offsets: dict[str, int]) -> list[Part]:
    """On a Ray node."""
    found: list[Part] = []
    root = cluster.log_directory(job, job_id)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    wanted = _wanted(root, which)
    for path in sorted(root.rglob("*.log")):
        with path.open("rb") as file:
            status: Any = os.fstat(file.fileno())
            identity = f"{machine}:{status.st_dev}:{status.st_ino}"
            data = b""
            # What was the newest generation until now has last words.
            if path in wanted or offsets.get(identity):
                file.seek(offsets.get(identity, 0))
                data = file.read(MOST_BYTES)
            if data or identity not in offsets:  # an empty file is worth its name
                found.append((identity, str(path.relative_to(root)), data))
    return found


def _wanted(root: Path, which: Which) -> set[Path]:
    if which.node is not None:
        return {root / f"agent-{which.node}.log"}
    generations = _numbered(root, r"gen-(\d+)")
    number = max(generations, default=0) if which.generation is None else which.generation
    ranks = _numbered(generations[number], r"rank-(\d+)\.log") if number in generations else {}
    return {path for rank, path in ranks.items() if which.rank in (None, rank)}


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in folder.glob("*")
        if (match := re.fullmatch(pattern, path.name))
    }
