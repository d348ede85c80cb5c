"""Files on the machines of a Ray cluster: copies a job's logs from them, and looks up scripts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from . import ray_nodes

MAX_BYTES = 8 << 20
"""Bytes of one file in one call."""
ANSWER_S = 60.0


class FilePart(NamedTuple):
    identity: str
    """Identity of the file on all machines."""
    path: str
    """Path of the bytes' log, below the log directory."""
    data: bytes
    end: int
    """The offset in the file up to which it is read."""


class LogFilter(NamedTuple):
    """The files whose content is fetched; of all others only the names are."""

    rank: int | None
    generation: int | None
    """None: the newest, or those from `since` on."""
    node: str | None
    """This node's agent, instead of workers."""
    since: int | None = None


def fetch_logs(
    job: str, job_id: str, wanted: LogFilter, offsets: dict[str, int], target: Path
) -> bool:
    """Append new bytes to the copies under `target`; `offsets` (identity -> bytes read) is kept
    from call to call. Returns whether there were any. Nodes that do not answer are skipped."""
    import ray

    # Several Ray nodes of one machine have the same files.
    machines = {str(r["NodeManagerHostname"]): node for node, r in ray_nodes.alive_nodes().items()}
    arguments = job, job_id, wanted, offsets
    parts: dict[str, FilePart] = {}
    # Through a Ray client (ray://) this process is on no machine of the cluster.
    if not ray.util.client.ray.is_connected():
        machines.pop(socket.gethostname(), None)
        parts |= {part.identity: part for part in _read(*arguments)}
    for answer in _on_ray_nodes(machines.values(), _read, *arguments):
        parts |= {part.identity: part for part in answer}
    return append(parts.values(), offsets, target)


def append(parts: Iterable[FilePart], offsets: dict[str, int], target: Path) -> bool:
    """Write them to the copies; whether there was anything to write."""
    some = False
    for identity, path, data, end in parts:
        offsets[identity] = end
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("ab") as file:
            file.write(data)
        some = some or bool(data)
    return some


def _on_ray_nodes(nodes: Iterable[str], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function` on the Ray nodes that answer."""
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
    """Read log files; runs on a Ray node."""
    parts: list[FilePart] = []
    root = ray_nodes.log_directory(job, job_id)
    wanted_files = matching(root, wanted)
    for path in sorted(root.rglob("*.log")):
        try:
            parts += _read_log(path, str(path.relative_to(root)), path in wanted_files, offsets)
        except FileNotFoundError:  # its generation was deleted meanwhile
            continue
    return parts


def _read_log(path: Path, name: str, wanted: bool, offsets: dict[str, int]) -> list[FilePart]:
    """The new part of one log. The agent moves the content of a large one to `NAME.1` and truncates
    it: the unread rest of that comes first, so that the copy is whole."""
    parts: list[FilePart] = []
    with path.open("rb") as file:
        identity, size = _identity(file)
        begin = offsets.get(identity, 0)
        rotated = size < begin
        # The generation that was the newest until now may have written more lines.
        wanted = wanted or begin > 0
        older = path.with_name(f"{path.name}.1")
        # The log is not read before its older part is, so that begin is 0 until then.
        if (rotated or begin == 0) and older.is_file():
            with older.open("rb") as rest:
                of_older, _size = _identity(rest)
                at = begin if rotated else offsets.get(of_older, 0)
                wanted = wanted or at > 0
                rest.seek(at)
                data = rest.read(MAX_BYTES) if wanted else b""
                if data or rotated:
                    parts.append(FilePart(of_older, name, data, at + len(data)))
        begin = 0 if rotated else begin
        data = b""
        if wanted and not (parts and len(parts[0].data) == MAX_BYTES):
            file.seek(begin)
            data = file.read(MAX_BYTES)
        if data or rotated or identity not in offsets:  # of an empty file the name counts
            parts.append(FilePart(identity, name, data, begin + len(data)))
    return parts


def _identity(file: BinaryIO) -> tuple[str, int]:
    """Identity of an open file on all machines, and its size."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status: Any = os.fstat(file.fileno())
    return f"{machine}:{status.st_dev}:{status.st_ino}", status.st_size


def matching(root: Path, wanted: LogFilter) -> set[Path]:
    """Log files of a job below `root` whose content is wanted."""
    if wanted.node is not None:
        return {root / f"agent-{wanted.node}.log"}
    generations = _numbered(root, r"gen-(\d+)")
    number = max(generations, default=0) if wanted.generation is None else wanted.generation
    chosen = {generation for generation in generations if generation == number}
    if wanted.since is not None and wanted.generation is None:
        chosen = {generation for generation in generations if generation >= wanted.since}
    ranks = [_numbered(generations[generation], r"rank-(\d+)\.log") for generation in chosen]
    return {path for of in ranks for rank, path in of.items() if wanted.rank in (None, rank)}


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in folder.glob("*")
        if (match := re.fullmatch(pattern, path.name))
    }
