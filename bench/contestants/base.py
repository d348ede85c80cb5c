"""The interface of a contestant, and the bookkeeping of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "bench" / "train.py"
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@dataclass
class Workload:
    """The same for every contestant: by default 4 ranks over 2 nodes, FSDP2, one thread a rank."""

    directory: Path
    steps: int = 400
    save_every: int = 10
    shard: int | str = 2
    """Ranks that share one copy of the model; `world`: all that there are."""
    num_ranks: int = 4
    gpu: int = 0
    """GPUs of a rank, as Holdfast's spec has it."""
    options: tuple[str, ...] = ()
    """More options of the script."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def timeline(self) -> Path:
        return self.directory / "timeline"

    def arguments(self) -> list[str]:
        return [
            "--timeline", str(self.timeline), "--checkpoints", str(self.directory / "dcp"),
            "--steps", str(self.steps), "--save-every", str(self.save_every),
            "--shard", str(self.shard), *self.options,
        ]  # fmt: skip


class Contestant(ABC):
    """One way to run the workload. Subclasses start processes and know which belong to a node."""

    name = ""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.processes: list[subprocess.Popen[bytes]] = []
        workload.timeline.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def start(self) -> None:
        """Launch all nodes; returns before they train."""

    @abstractmethod
    def kill_node(self, worker_pid: int) -> None:
        """SIGKILL everything of the node that the worker belongs to, at once."""

    def begun(self) -> float | None:
        """Time of the launch; None: when start() was called."""
        return None

    def store_host(self) -> int | None:
        """The process (a node's agent) that hosts the rendezvous of all nodes, if there is one."""
        return None

    def replace_node(self) -> None:  # noqa: B027 (optional)
        """Start a replacement, if the contestant does not do it by itself."""

    def phases(self) -> dict[str, float]:
        """Seconds of the last recovery by phase, if the contestant reports them."""
        return {}

    def spawn(self, command: list[str], log: str, **env: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
        environment |= {**self.workload.environment, **env}
        with (self.workload.directory / log).open("ab") as out:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """End every process of this run, and wait until they are gone."""
        kill_trees([process.pid for process in self.processes])
        for process in self.processes:
            process.wait()


def print_logs(directory: Path, out: TextIO) -> None:
    """Print the ends of the logs below a directory that is about to be removed."""
    for log in sorted(directory.rglob("*.log")):
        text = log.read_text(errors="replace")[-3000:]
        print(f"== {log.relative_to(directory)}", text, sep="\n", file=out)


def python() -> str:
    return sys.executable


def kill_trees(pids: list[int]) -> None:
    """SIGKILL these processes and all their descendants, in one go."""
    doomed: list[psutil.Process] = []
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            doomed += [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for process in doomed:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, timeout=10)
