"""A job on the test cluster, by `holdfast run FILE --ray ADDRESS`; waits are on its views."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from holdfast.orchestrator.runtime.observe.view import Incident, JobView

from ..local.local_rig import spec
from . import cluster_rig

BOUND_S = 180.0


def holdfast(*words: str, timeout_s: float = BOUND_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.orchestrator.cli.main", *words],
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def started(*words: str) -> subprocess.Popen[str]:
    """A command that keeps running; `says` reads its output."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "holdfast.orchestrator.cli.main", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def says(process: subprocess.Popen[str], pattern: str) -> str:
    """All lines up to one that matches; the test's time limit is the bound."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError("".join(lines))


class Job:
    """One job; its command runs until `end`."""

    def __init__(
        self, place: Path, name: str, steps: int, *, cluster: Any = None, **changes: Any
    ) -> None:
        """`cluster`: one that this process is a driver of, instead of the shared one."""
        from holdfast.orchestrator.cli.targets.ray.target import RayTarget

        self.cluster = cluster or cluster_rig.connected()
        self.name = name
        self.file = place / f"{name}.yaml"
        changes = {
            "checkpoint": {
                "path": str(place / name),
                "storage": {"everySteps": 20},
                "memory": {"everySteps": 1},
            }
        } | changes
        self.file.write_text(yaml.safe_dump(spec(name, steps, **changes)))
        self.output = place / f"{name}.log"
        self._place = RayTarget(self.cluster.address)
        with self.output.open("ab") as output:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "holdfast.orchestrator.cli.main", *self._words()],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def _words(self) -> list[str]:
        return ["run", str(self.file), "--ray", self.cluster.address]

    def attach(self) -> None:
        """Replace the command, which has ended, by a new one that watches the job."""
        with self.output.open("ab") as output:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "holdfast.orchestrator.cli.main", "attach", self.name,
                 "--ray", self.cluster.address],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def view(self) -> JobView:
        return self._place.find(self.name).view()

    def until(self, true: Callable[[JobView], bool]) -> JobView:
        """The first view that fulfils a condition."""
        from holdfast.orchestrator.backends.ray import actors
        from holdfast.orchestrator.errors import UserError
        from holdfast.orchestrator.hosts.ray import actor as controller_actor

        give_up, seen, view = time.monotonic() + BOUND_S, -1, None
        while time.monotonic() < give_up:
            try:
                view = self.view()
                if true(view):
                    return view
                actor = controller_actor.find(self.name)
                if actor is not None:
                    seen = actors.ask(actor, "watch", seen, timeout_s=5.0)["seen"]
            except (actors.ControllerActorGone, UserError):
                seen = -1  # no controller at the moment
            if self.command.poll() not in (None, 0, 1):
                raise AssertionError(self.output.read_text())
        raise AssertionError(f"not in {BOUND_S:g} s: {view}\n{self.output.read_text()[-2000:]}")

    def running(self, nodes: int = 2) -> JobView:
        """Wait until the job trains on that many nodes."""
        return self.until(
            lambda view: (
                view.state == "running"
                and view.step >= 2
                and sum(node.state == "member" for node in view.nodes) == nodes
            )
        )

    def incident_after(self, number: int) -> Incident:
        """The first incident after that number, once it is over."""
        view = self.until(
            lambda view: any(
                one.number > number and "total" in one.seconds for one in view.incidents
            )
        )
        return next(one for one in view.incidents if one.number > number)

    def events_until(self, pattern: str) -> str:
        """The job's events up to a line that matches, from one command that follows them."""
        self.until(lambda view: True)  # the job has a record
        follower = started("debug", "events", self.name, "-f", "--ray", self.cluster.address)
        try:
            return says(follower, pattern)
        finally:
            follower.kill()
            follower.communicate()

    def facts(self, node: str) -> dict[str, Any]:
        import ray

        from holdfast.orchestrator.backends.ray import actors

        actor = actors.find_agent(self.name, node)
        found: dict[str, Any] = ray.get(actor.facts.remote(), timeout=60)
        return found

    def controller(self) -> dict[str, Any]:
        from holdfast.orchestrator.backends.ray import actors
        from holdfast.orchestrator.hosts.ray import actor as controller_actor

        found: dict[str, Any] = actors.ask(controller_actor.find(self.name), "facts")
        return found

    def worker_pid(self, rank: int) -> int:
        view = self.view()
        for node in view.nodes:
            if any(worker.rank == rank for worker in node.workers):
                agent = psutil.Process(self.facts(node.name)["pid"])
                for process in agent.children(recursive=True):
                    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    if name == f"hf-rank-{rank}":
                        return process.pid
        raise AssertionError(f"there is no rank {rank}")

    def members(self) -> list[str]:
        return [node.name for node in self.view().nodes if node.state == "member"]

    def end(self) -> None:
        """Remove what the test has left."""
        from holdfast.orchestrator.backends.ray import kv
        from holdfast.orchestrator.hosts.ray import actor as controller_actor

        if controller_actor.find(self.name) is not None:
            holdfast("cancel", self.name, "--ray", self.cluster.address)
        try:
            self.command.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(self.command.pid, signal.SIGKILL)
            self.command.wait()
        kv.JobKeyValueStore(self.name).clear()


class Submitted(Job):
    """A job that is submitted through the Jobs API."""

    def _words(self) -> list[str]:
        return ["run", str(self.file), "--ray", self.cluster.dashboard]

    def info(self) -> Any:
        """Entry in Ray's Jobs API."""
        from ray.job_submission import JobSubmissionClient

        listed = JobSubmissionClient(self.cluster.dashboard).list_jobs()
        (found,) = [one for one in listed if (one.metadata or {}).get("holdfast_job") == self.name]
        return found
