"""One job of bench/soak.py: it is watched, broken in many ways, and compared with another one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.runtime.observe.view import Incident, JobView
from tests.e2e.local.local_rig import Job, spec, state_in

SCRIPT = Path(__file__).parent / "soak_train.py"
HOME_BYTES, STORE_BYTES = 96 * 2**20, 64 * 2**20
EVERY_STEPS = 10
"""Steps between two checkpoints in storage."""
PAUSE_S = 0.02
"""Pause after each step, so that a fault does not need hundreds of them."""
MANY = 1_000_000
"""Restarts within a window: a thousand faults in an hour are more than any user allows."""
WORLD_SIZE = 4
BOUND_S = 120.0
"""A job that has not recovered within this time has not recovered by itself."""


class NotRecovered(Exception):
    """The job has ended, holds, or makes no steps."""


class Victim(Exception):
    """Signal that no such process exists now."""


def can_mount() -> bool:
    """True if this user may mount small file systems, for full and slow disks."""
    return os.geteuid() == 0 and all(map(shutil.which, ("mkfs.ext4", "fsfreeze", "losetup")))


class SoakJob:
    """Two nodes with two workers each. `fixed`: it never goes on with one node."""

    def __init__(self, place: Path, *, fixed: bool, disks: bool, pause_s: float = PAUSE_S) -> None:
        self.place, self._disks = place, disks
        place.mkdir(parents=True)
        self.stop_file = place / "stop"
        self.disk, self.store = place / "disk", place / "disk" / "checkpoints"
        self.disk.mkdir()
        self.progress = place / "progress"
        self.progress.mkdir()
        args = [str(self.stop_file), str(self.progress), str(pause_s)]
        budgets = {name: {"restarts": MANY} for name in ("infrastructure", "hang", "preemption")}
        document = spec(
            "soak", 1,
            entrypoint={"script": str(SCRIPT), "args": args},
            nodes={"min": 2 if fixed else 1, "max": 2},
            checkpoint={
                "path": str(self.store), "storage": {"everySteps": EVERY_STEPS},
                "memory": {"everySteps": 1}, "retention": {"keepLast": 2},
            },
            recovery={"budgets": budgets, "badNodeStrikes": MANY, "growDelaySeconds": 0.5},
        )  # fmt: skip
        self.job, self.home = Job(place, document), place / "home"
        if disks:
            self._mount()
        self.watch = Watch(self.job)

    def _mount(self) -> None:
        image = self.place / "disk.img"
        with image.open("wb") as file:
            file.truncate(STORE_BYTES)
        run("mkfs.ext4", "-q", "-F", str(image))
        run("mount", "-o", "loop", str(image), str(self.disk))
        run("mount", "-t", "tmpfs", "-o", f"size={HOME_BYTES}", "none", str(self.home))

    def start(self) -> None:
        self.job.run()
        self.watch.start()

    def steps(self) -> list[int]:
        """The newest step of each rank; -1: none yet."""
        files = [self.progress / str(rank) for rank in range(WORLD_SIZE)]
        return [int(file.read_text() or -1) if file.exists() else -1 for file in files]

    def finish(self, steps: int) -> JobView:
        """Train until so many steps are done, to the end of the job."""
        text = self.stop_file.with_suffix(".new")
        text.write_text(str(steps))
        text.replace(self.stop_file)
        view = self._wait()
        if view.state != "succeeded":
            raise NotRecovered(f"the job has {view.state}: {view.reason}")
        return view

    def _wait(self) -> JobView:
        """The final view. Raises NotRecovered if no step is made for long."""
        newest, deadline = self.steps(), time.monotonic() + BOUND_S
        while self.job.command.poll() is None:
            if self.steps() != newest:
                newest, deadline = self.steps(), time.monotonic() + BOUND_S
            if time.monotonic() > deadline:
                raise NotRecovered(f"the job does not end: no step since {newest}")
            time.sleep(0.1)
        return self.job.wait()

    def end(self, keep: bool) -> None:
        """`keep`: journal and logs stay in the directory."""
        self.watch.close()
        self.job.end()
        if self._disks:
            subprocess.run(["fsfreeze", "-u", str(self.disk)], capture_output=True)
            if keep:
                for at in (self.home, self.disk):
                    shutil.copytree(
                        at, at.with_name(f"{at.name}-kept"), ignore=_special, dirs_exist_ok=True
                    )
            run("umount", "--lazy", str(self.home))
            run("umount", "--lazy", str(self.disk))
            (self.place / "disk.img").unlink()
        if not keep:
            shutil.rmtree(self.place, ignore_errors=True)

    # -- what happens to it -----------------------------------------------------------------------
    def kill_worker(self, chance: random.Random, number: signal.Signals = signal.SIGKILL) -> str:
        workers = self.job.worker_pids()
        if not workers:
            raise Victim("no worker")
        rank = chance.choice(sorted(workers))
        _signal(workers[rank], number)
        return f"rank {rank}"

    def stop_worker(self, chance: random.Random) -> str:
        return self.kill_worker(chance, signal.SIGSTOP)

    def agents(self) -> dict[str, int]:
        file = self.job.directory.path / "nodes.json"
        try:
            known = msgspec.json.decode(file.read_bytes())["agents"]
        except (OSError, msgspec.DecodeError):
            raise Victim("no node") from None
        return {name: one["pid"] for name, one in known.items() if alive(one["pid"])}

    def kill_nodes(self, chance: random.Random, count: int) -> str:
        agents = self.agents()
        if not agents:
            raise Victim("no node")
        names = chance.sample(sorted(agents), min(count, len(agents)))
        for name in names:
            _signal(agents[name], signal.SIGKILL)
        return ", ".join(names)

    def kill_host(self, chance: random.Random) -> str:
        """Kill the node launcher while it starts a node; a need for a node starts it."""
        victim = "node launcher"
        if not self._hosts():
            victim = f"{self.kill_nodes(chance, 1)}, then the node launcher of the next one"
            deadline = time.monotonic() + BOUND_S
            while not self._hosts() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3 * chance.random())
        for pid in self._hosts():
            _signal(pid, signal.SIGKILL)
        return victim

    def _hosts(self) -> list[int]:
        return [one.pid for one in self.job.processes() if one.name() == "hf-host"]

    def kill_controller(self) -> str:
        """Started again at once, as a supervisor does."""
        if not (self.job.directory.path / "journal").exists():
            raise Victim("no journal")
        self.job.command.kill()
        self.job.command.wait()
        self.job.attach()
        return "controller"

    @contextlib.contextmanager
    def full(self, place: Path) -> Iterator[None]:
        """No room on the file system of `place`."""
        ballast = place / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for num_bytes in (2**20, 2**12):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(num_bytes))
        try:
            yield
        finally:
            ballast.unlink()

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """The directory of the checkpoints is not there. What is written meanwhile is kept."""
        away = self.store.with_name("away")
        if not self.store.exists():
            raise Victim("no storage yet")
        self.store.rename(away)
        try:
            yield
        finally:
            if self.store.exists():
                for made in self.store.iterdir():
                    if not (away / made.name).exists():
                        made.rename(away / made.name)
                shutil.rmtree(self.store)
            away.rename(self.store)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Nothing is written to the file system of the checkpoints: calls wait."""
        run("fsfreeze", "-f", str(self.disk))
        try:
            yield
        finally:
            run("fsfreeze", "-u", str(self.disk))

    def writes(self) -> bool:
        """A shard or a manifest is being written just now."""
        with contextlib.suppress(OSError):
            for step in self.store.iterdir():
                if any(name.endswith(".tmp") for name in os.listdir(step)):  # noqa: PTH208
                    return True
        return False

    # -- what it has trained ----------------------------------------------------------------------
    def last_state(self) -> dict[str, Any]:
        """The checksums of all tensors of its last checkpoint, and the optimizer's numbers."""
        return state_in(self.store)


class Watch(threading.Thread):
    """The newest view of a job, whichever controller it has, and all incidents."""

    def __init__(self, job: Job) -> None:
        super().__init__(name="watch", daemon=True)
        self.incidents: dict[int, Incident] = {}
        self._job, self._view, self._open = job, JobView(name=""), threading.Event()
        self._open.set()
        self._changed = threading.Condition()

    def run(self) -> None:
        while self._open.is_set():
            with contextlib.suppress(OSError, AssertionError, ValueError):
                for view in self._job.views():
                    self._seen(view)
                    if not self._open.is_set():
                        return
            time.sleep(0.02)

    def _seen(self, view: JobView) -> None:
        with self._changed:
            self._view = view
            self.incidents.update({one.number: one for one in view.incidents})
            self._changed.notify_all()

    @property
    def view(self) -> JobView:
        return self._view

    def until(
        self, condition: Callable[[JobView], bool], what: str, bound_s: float = BOUND_S
    ) -> JobView:
        """Raises NotRecovered."""
        deadline = time.monotonic() + bound_s
        with self._changed:
            while not condition(self._view):
                view = self._view
                if view.state in (*TERMINAL, "suspended"):
                    raise NotRecovered(f"{what}: the job has {view.state}: {view.reason}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise NotRecovered(
                        f"{what}: not within {bound_s:g} s; {view.state}, step {view.step}, "
                        f"generation {view.generation}: {view.reason}"
                    )
            return self._view

    def close(self) -> None:
        self._open.clear()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise Victim(f"process {pid} has ended") from None


def _special(directory: str, names: list[str]) -> list[str]:
    """Sockets are not copied."""
    return [name for name in names if (Path(directory) / name).is_socket()]
