"""A job as a user runs it: `holdfast run` in a separate process, watched over its socket.

Tests wait for views of the job, never for a fixed time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from holdfast.orchestrator.hosts.local.job_records import read_view
from holdfast.orchestrator.protocol.environment import CACHES
from holdfast.orchestrator.protocol.manifest import directory_name
from holdfast.orchestrator.protocol.messages import Reply, Request, decode, encode, frame_length
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from holdfast.orchestrator.runtime.observe.view import JobView
from holdfast.workers.checkpoint import inspect
from holdfast.workers.checkpoint.shard_sources import CheckpointFiles
from tests.documents import job_document

BOUND_S = 120.0
ENDLESS = 1_000_000


def spec(name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """A small transformer on 2 x 2 workers, HSDP 2 x 2. An endless job is kind to other tests."""
    config = {
        "steps": steps,
        "minStepSeconds": 0.5 if steps >= ENDLESS else 0,
        "globalBatch": 4,
        "model": {"dim": 32, "numLayers": 1, "numHeads": 2},
        "data": {"sequenceLength": 16},
    }
    return job_document(
        name,
        {
            "entrypoint": {"recipe": {"name": "pretrain", "config": config}},
            "nodes": {"min": 1, "max": 2},
            "workersPerNode": 2,
            "resources": {"cpu": 1, "gpu": 0},
            "parallelism": {"shard": 2},
            "checkpoint": {"storage": {"everySteps": 50}, "memory": {"everySteps": 1}},
            **changes,
        },
    )


def _environment() -> dict[str, str]:
    """The environment of this process, without the directories that torch writes into it when a
    test imports torch._dynamo: a job would take them for the user's choice."""
    return {name: value for name, value in os.environ.items() if name not in CACHES}


def short(home: Path) -> Path:
    """A link to the new directory `home`, short enough for the path of a Unix socket below it."""
    home.mkdir(exist_ok=True)
    link = Path(_LINKS.name) / str(next(_NUMBERS))
    link.symlink_to(home)
    return link


_LINKS = tempfile.TemporaryDirectory(prefix="hf-")
_NUMBERS = itertools.count()


class Job:
    """A job and the command that runs it."""

    def __init__(self, place: Path, document: dict[str, Any]) -> None:
        self.place = place
        self.name = str(document["metadata"]["name"])
        self.home = short(place / "home")
        self.file = place / "job.yaml"
        self.file.write_text(yaml.safe_dump(document))
        self.directory: JobDirectory = Home(self.home).directory(self.name)
        self.command: subprocess.Popen[bytes]

    def run(self, *arguments: str, verb: str = "run") -> None:
        """`holdfast run` or another verb; its output goes to a file, for failed tests."""
        words = arguments or (str(self.file),)
        with (self.place / "output.log").open("ab") as output:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "holdfast.orchestrator.cli.main", verb, *words,
                 "--home", str(self.home)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(),
            )  # fmt: skip

    def run_unread(self) -> None:
        """`holdfast run FILE | true`."""
        self.command = subprocess.Popen(
            [sys.executable, "-m", "holdfast.orchestrator.cli.main", "run", str(self.file),
             "--home", str(self.home)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=_environment(),
        )  # fmt: skip
        assert self.command.stdout is not None
        self.command.stdout.close()

    def attach(self) -> None:
        self.run(self.name, verb="attach")

    def output(self) -> str:
        return (self.place / "output.log").read_text()

    # -- watching ------------------------------------------------------------------------------
    def until(self, condition: Callable[[JobView], bool]) -> JobView:
        """The first view for which `condition` is true."""
        for view in self.views():
            if condition(view):
                return view
        raise AssertionError(f"the controller has ended:\n{self.output()[-3000:]}")

    def views(self) -> Iterator[JobView]:
        """Every view until this controller ends."""
        with self._watch() as stream:
            while (view := _next_view(stream)) is not None:
                yield view

    def _watch(self) -> socket.socket:
        place = self._controller()
        stream = socket.create_connection((place["address"], place["port"]), timeout=BOUND_S)
        stream.sendall(encode(Request(token=self.directory.token(), verb="watch")))
        return stream

    def _controller(self) -> dict[str, Any]:
        """The address of the controller, after it listens."""
        waited = 0.0
        while waited < BOUND_S:
            place = self.directory.controller()
            with contextlib.suppress(psutil.NoSuchProcess):
                if place and psutil.Process(place["pid"]).ppid() == self.command.pid:
                    return place
            try:
                self.command.wait(0.05)
            except subprocess.TimeoutExpired:
                waited += 0.05
            else:
                raise AssertionError(f"the command has ended:\n{self.output()[-3000:]}")
        raise AssertionError("the controller does not listen")

    @property
    def controller_pid(self) -> int:
        return int(self._controller()["pid"])

    def request(self, verb: str, **arguments: Any) -> Reply:
        place = self._controller()
        with socket.create_connection((place["address"], place["port"]), timeout=BOUND_S) as link:
            link.sendall(
                encode(Request(token=self.directory.token(), verb=verb, arguments=arguments))
            )
            reply = _next_reply(link)
        assert reply is not None
        return reply

    def running(self, *, incidents: int, steps: int = 2) -> JobView:
        """The view when the job runs after this many incidents and has done `steps` more steps."""
        view = self.until(lambda v: v.state == "running" and len(v.incidents) == incidents)
        return self.until(lambda v: v.step >= view.step + steps)

    def wait(self) -> JobView:
        """Wait for the end of the command; the final view."""
        self.command.wait(BOUND_S)
        submitted = (self.directory.path / "job.json").exists()
        assert submitted, f"no job was submitted:\n{self.output()}"
        return read_view(self.directory)

    # -- processes -----------------------------------------------------------------------------
    def agent_pid(self, node: str) -> int:
        nodes = msgspec.json.decode((self.directory.path / "nodes.json").read_bytes())
        return int(nodes["agents"][node]["pid"])

    def worker_pids(self) -> dict[int, int]:
        """Rank -> pid, from the log file of each worker, which its loaders' processes share."""
        ranks: dict[int, int] = {}
        parents: dict[int, int] = {}
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.Error):
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
                if match := re.fullmatch(r"rank-(\d+)\.log", log.name):
                    ranks[process.pid], parents[process.pid] = int(match[1]), process.ppid()
        return {ranks[pid]: pid for pid in ranks if parents[pid] not in ranks}

    def processes(self) -> list[psutil.Process]:
        """All processes of this job but the command, by the socket in its node launchers."""
        mark = str(self.directory.host_socket)
        return [
            process
            for process in psutil.process_iter(["cmdline", "status", "name"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and mark in (process.info["cmdline"] or [])
        ]

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def end(self) -> None:
        """Kill all remaining processes."""
        if self.command.poll() is None:
            self.command.kill()
            self.command.wait()
        for process in self.processes():
            process.kill()


def _next_reply(stream: socket.socket) -> Reply | None:
    header = _exactly(stream, 4)
    if header is None:
        return None
    body = _exactly(stream, frame_length(header))
    if body is None:
        return None
    reply = decode(body)
    assert isinstance(reply, Reply)
    return reply


def _next_view(stream: socket.socket) -> JobView | None:
    reply = _next_reply(stream)
    return None if reply is None else msgspec.convert(reply.body, JobView)


def _exactly(stream: socket.socket, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        part = stream.recv(length - len(data))
        if not part:
            return None
        data += part
    return data


def losses_of(job: Job) -> dict[int, str]:
    """Loss of every step as rank 0 printed it; a repeated step must print the same loss."""
    found: dict[int, str] = {}
    for log in sorted(job.directory.path.glob("logs/gen-*/rank-00000.log")):
        for step, loss in re.findall(r"^step (\d+) loss (\S+)", log.read_text(), re.M):
            assert found.setdefault(int(step), loss) == loss, f"step {step} changed: {log}"
    return found


def last_state(job: Job, step: int) -> dict[str, Any]:
    """State of the last committed checkpoint, which is `step`'s."""
    found = state_in(job.directory.path / "checkpoints")
    assert found["step"] == step
    return found


def state_in(store: Path) -> dict[str, Any]:
    """State of the newest checkpoint there: its step, the checksum of every tensor of every shard
    (weights, moments and step counters), and the numbers of the optimizer."""
    manifest, files = inspect.find(str(store)), CheckpointFiles(str(store))
    found: dict[str, Any] = {"step": manifest.step}
    for file in manifest.files:
        header = files.open(directory_name(manifest.step, manifest.generation), file).header()
        found[f"{file.shard} extra"] = header.extra
        for name, entry in header.entries.items():
            found[f"{file.shard} {name}"] = (entry.box, entry.checksum)
    return found


def holdfast(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    """Any command, in the home of this job."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast.orchestrator.cli.main", *words, "--home", str(job.home)],
        capture_output=True, text=True, check=False, timeout=BOUND_S,
    )  # fmt: skip
