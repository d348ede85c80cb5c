"""One run of the rig: its name, its directory, and the removal of everything with that name.

Clean-up covers three cases: the run ends; the run is killed (a keeper process notices the closed
pipe and cleans up); the keeper is killed too (the next run cleans up). Removal only needs names and
recorded process ids, and touches nothing without the name of a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.e2e.kubernetes.rig import cgroups, network
from tests.e2e.kubernetes.rig.waiting import until

REPOSITORY = Path(__file__).parents[4]


def base() -> Path:
    """The directory of all runs of this user."""
    return Path(tempfile.gettempdir()) / f"holdfast-rig-{os.getuid()}"


class Run:
    """A context manager; leaving it removes everything."""

    def __init__(self) -> None:
        base().mkdir(mode=0o755, exist_ok=True)
        if base().stat().st_uid != os.getuid():
            raise RuntimeError(f"{base()} belongs to another user: remove it")
        # A run that starts meanwhile must not remove this directory as a leftover.
        with (base() / "lock").open("w") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            sweep_leftovers()
            self.name = secrets.token_hex(2)
            self.directory = base() / self.name
            (self.directory / "processes").mkdir(parents=True)
            self._lock = (self.directory / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._at_end: list[Callable[[], None]] = []
        self._keeper, self._pipe = self._start_keeper()

    def _start_keeper(self) -> tuple[subprocess.Popen[bytes], int]:
        reads, writes = os.pipe()
        with (self.directory / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", __name__, self.name],
                cwd=REPOSITORY,
                stdin=reads,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is for the tests
            )
        os.close(reads)
        return keeper, writes

    def record(self, name: str, pid: int) -> None:
        """Record a process with its start time, because process ids are reused."""
        document = {"pid": pid, "started": started(pid)}
        (self.directory / "processes" / f"{name}.json").write_text(json.dumps(document))

    def forget(self, name: str) -> None:
        (self.directory / "processes" / f"{name}.json").unlink(missing_ok=True)

    def at_end(self, end: Callable[[], None]) -> None:
        """Called when the run is closed; for parts of this process, such as threads."""
        self._at_end.append(end)

    def close(self) -> None:
        """Remove everything. Raises if something of the run is left."""
        try:
            for end in self._at_end:
                end()
            self._keep_logs()
            remove(self.name)
        finally:
            os.close(self._pipe)
            self._keeper.wait(timeout=60)
            self._lock.close()

    def _keep_logs(self) -> None:
        """Copy the logs to the directory that HOLDFAST_RIG_LOGS names."""
        if wanted := os.environ.get("HOLDFAST_RIG_LOGS"):
            for log in self.directory.rglob("*.log"):
                target = Path(wanted) / self.name / log.relative_to(self.directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, target)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def started(pid: int) -> str:
    """Start time of a process, in clock ticks since boot; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[19]


def is_ours(document: dict[str, object]) -> bool:
    pid = document["pid"]
    return isinstance(pid, int) and started(pid) == document["started"] != ""


def recorded(directory: Path) -> list[int]:
    """The recorded processes of a run that still exist."""
    found = []
    for path in sorted((directory / "processes").glob("*.json")):
        with contextlib.suppress(json.JSONDecodeError):
            document = json.loads(path.read_text())
            if is_ours(document):
                found.append(document["pid"])
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """False for a process that has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def mounts_below(directory: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((p for p in points if p.startswith(f"{directory}/")), reverse=True)


def remove(name: str) -> None:
    """Remove everything that a run of this name has created."""
    directory = base() / name
    pids = recorded(directory)
    kill(pids)
    cgroups.remove(name)
    until(lambda: not any(is_running(pid) for pid in pids), "killed processes", timeout_s=20)
    network.remove(name)
    for point in mounts_below(directory):
        subprocess.run(["umount", "--lazy", point], check=True)
    if directory.exists():
        shutil.rmtree(directory)


def leftovers(name: str) -> list[str]:
    """Processes and files left of a run, for tests of the rig and for error messages."""
    directory = base() / name
    found = [f"process {pid}" for pid in recorded(directory)]
    found += [f"cgroup {path}" for path in cgroups.of_run(name)]
    found += [f"network device {device}" for device in network.of_run(name)]
    found += [f"mount {point}" for point in mounts_below(directory)]
    return found + ([f"directory {directory}"] if directory.exists() else [])


def sweep_leftovers() -> None:
    """Remove the runs whose process has ended, which frees their lock."""
    for directory in filter(Path.is_dir, base().iterdir()):
        with contextlib.suppress(FileNotFoundError), (directory / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove(directory.name)


def keep(name: str) -> None:
    """The keeper: wait until the run closes its pipe or dies, then clean up."""
    while sys.stdin.buffer.read(1):
        pass
    # The run holds the lock while it lives, and the next run while it removes leftovers.
    with (
        contextlib.suppress(FileNotFoundError),
        (base() / name / "lock").open("r") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (base() / name).exists():
            remove(name)


if __name__ == "__main__":
    keep(sys.argv[1])
