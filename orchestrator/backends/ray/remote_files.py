"""Files on the machines of a Ray cluster: copies a job's logs from them, and looks up scripts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import ray_nodes

MAX_BYTES = 8 << 20
"""Of one file in one call."""
ANSWER_S = 60.0

FilePart = tuple[str, str, bytes]
"""(identity of the file, path below the log directory, bytes from the requested offset)."""


class LogFilter(NamedTuple):
    """The files whose content is fetched; of all others only the names are."""

    rank: int | None
    generation: int | None
    """None: the newest, or with `every` each of them."""
    node: str | None
    """This node's agent, instead of workers."""
    every: bool = False


def fetch_logs(
    job: str, job_id: str, wanted: LogFilter, offsets: dict[str, int], target: Path
) -> bool:
    """Append new bytes to the copies under `target`; `offsets` (identity -> bytes read) is kept
    from call to call. Returns whether there were any. Nodes that do not answer are skipped."""
    import ray

    # Several Ray nodes of one machine have the same files.
    machines = {
        str(one["NodeManagerHostname"]): node for node, one in ray_nodes.alive_nodes().items()
    }
    arguments = job, job_id, wanted, offsets
    parts: dict[str, FilePart] = {}
    # Through a Ray client (ray://) this process is on no machine of the cluster.
    if not ray.util.client.ray.is_connected():
        machines.pop(socket.gethostname(), None)
        parts |= {part[0]: part for part in _read(*arguments)}
    for answer in _on_ray_nodes(machines.values(), _read, *arguments):
        parts |= {part[0]: part for part in answer}
    for identity, path, data in parts.values():
        offsets[identity] = offsets.get(identity, 0) + len(data)
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("ab") as file:
            file.write(data)
    return any(data for _identity, _path, data in parts.values())


def on_no_node(path: str) -> bool:
    """Whether every Ray node that answers lacks this file."""
    answers = _on_ray_nodes(ray_nodes.alive_nodes(), os.path.isfile, path)
    return bool(answers) and not any(answers)


def _on_ray_nodes(nodes: Iterable[str], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returns on each of these Ray nodes, of those that answer."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # `logs -f` reads twice a second: its tasks would fill Ray's list of tasks.
    task = ray.remote(num_cpus=0, max_retries=0, enable_task_events=False)(function)
    calls = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            *arguments
        )
        for node in nodes
    ]
    answers = []
    for call in ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)[0] if calls else ():
        try:
            answers.append(ray.get(call))
        except RayError:
            continue
    return answers


def _read(job: str, job_id: str, wanted: LogFilter, offsets: dict[str, int]) -> list[FilePart]:
    """On a Ray node."""
    found: list[FilePart] = []
    root = ray_nodes.log_directory(job, job_id)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    wanted_files = matching(root, wanted)
    for path in sorted(root.rglob("*.log")):
        with path.open("rb") as file:
            status: Any = os.fstat(file.fileno())
            identity = f"{machine}:{status.st_dev}:{status.st_ino}"
            data = b""
            # The generation that was the newest until now may have written more lines.
            if path in wanted_files or offsets.get(identity):
                file.seek(offsets.get(identity, 0))
                data = file.read(MAX_BYTES)
            if data or identity not in offsets:  # of an empty file the name counts
                found.append((identity, str(path.relative_to(root)), data))
    return found


def matching(root: Path, wanted: LogFilter) -> set[Path]:
    """Of the log files of a job below `root`, those whose content is wanted."""
    if wanted.node is not None:
        return {root / f"agent-{wanted.node}.log"}
    generations = _numbered(root, r"gen-(\d+)")
    number = max(generations, default=0) if wanted.generation is None else wanted.generation
    chosen = {one for one in generations if one == number}
    if wanted.every and wanted.generation is None:
        chosen = set(generations)
    ranks = [_numbered(generations[one], r"rank-(\d+)\.log") for one in chosen]
    return {path for of in ranks for rank, path in of.items() if wanted.rank in (None, rank)}


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in folder.glob("*")
        if (match := re.fullmatch(pattern, path.name))
    }
