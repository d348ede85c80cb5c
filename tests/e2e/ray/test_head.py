"""The head of a Ray cluster is lost: with Redis behind its store the job goes on; without, only its
checkpoints outlive the cluster, and a job on a new cluster resumes from them. Before that, another
Ray node is asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ..local.local_rig import spec
from .headed_cluster import BOUND_S, HeadedCluster, kill_tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


VIEWS = """
import json, sys, time
from holdfast.orchestrator.cli.targets.ray.target import RayTarget
from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.runtime.control_api import view_body
target = RayTarget(sys.argv[1])
while True:
    try:
        print(json.dumps(view_body(target.find(sys.argv[2]).view())), flush=True)
    except HoldfastError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    time.sleep(0.2)
"""


class WatchedJob:
    """A job on a HeadedCluster, watched by processes: this one drives another cluster."""

    def __init__(self, cluster: HeadedCluster, place: Path, name: str) -> None:
        self.cluster, self.place, self.name = cluster, place, name
        self.file = place / f"{name}.yaml"
        storage = {
            "path": str(place / "checkpoints"),
            "storage": {"everySteps": 20},
            "memory": {"everySteps": 1},
        }
        self.file.write_text(yaml.safe_dump(spec(name, 1_000_000, checkpoint=storage)))
        self.output = place / f"{name}.log"
        self._views: subprocess.Popen[str] | None = None
        self.run()

    def run(self) -> None:
        """Start the command that stays attached."""
        with self.output.open("ab") as output:
            self.command = subprocess.Popen(
                self._words("run", str(self.file)), stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env=self.cluster.environment,
            )  # fmt: skip

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(*words), capture_output=True, text=True, timeout=BOUND_S, check=False,
            env=self.cluster.environment,
        )  # fmt: skip

    def _words(self, *words: str) -> list[str]:
        return [
            sys.executable, "-u", "-m", "holdfast.orchestrator.cli.main", *words,
            "--ray", self.cluster.address,
        ]  # fmt: skip

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first view that fulfils a condition."""
        view: dict[str, Any] = {}
        give_up = time.monotonic() + BOUND_S
        while time.monotonic() < give_up:
            view = self._next_view()
            if "error" not in view and true(view):
                return view
        raise AssertionError(f"{view}\n{self.output.read_text()[-3000:]}")

    def _next_view(self) -> dict[str, Any]:
        """The next view by one process that stays connected: a command takes seconds to connect."""
        if self._views is None:
            words = [sys.executable, "-c", VIEWS, self.cluster.address, self.name]
            self._views = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                env=self.cluster.environment,
            )  # fmt: skip
        assert self._views.stdout is not None
        line = self._views.stdout.readline()  # the test's time limit is the bound
        if not line:
            self._stop_views()
        return dict(json.loads(line)) if line else {"error": "the watching process ended"}

    def _stop_views(self) -> None:
        if self._views is not None:
            self._views.kill()
            self._views.communicate()
            self._views = None

    def lose_head(self) -> None:
        self._stop_views()
        self.cluster.lose_head()

    def trains(self, beyond: int = 2) -> dict[str, Any]:
        return self.until(lambda view: view["state"] == "running" and view["step"] > beyond)

    def committed(self) -> int:
        """The newest step in storage; -1: none."""
        found = [
            int(match[1])
            for path in self.place.glob("checkpoints/**/manifest.json")
            if (match := re.search(r"step-0*(\d+)", str(path)))
        ]
        return max(found, default=-1)

    def processes(self) -> list[psutil.Process]:
        """Agents and workers, wherever they are."""
        words = ["--job", self.name]
        return [
            one
            for one in psutil.process_iter(["cmdline"])  # a worker has its agent's
            if "holdfast.workers.agent" in (line := one.info["cmdline"] or [])
            and any(line[at : at + 2] == words for at in range(len(line)))
        ]

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.processes() if one.name().startswith("hf-rank-")]

    def close(self) -> None:
        self._stop_views()
        kill_tree(self.command.pid)
        self.command.wait()


@contextmanager
def training(place: Path, name: str, *, redis: bool = False, nodes: int) -> Iterator[WatchedJob]:
    cluster = HeadedCluster(redis=redis, nodes=nodes)
    try:
        job = WatchedJob(cluster, place, name)
        try:
            job.trains()
            yield job
        finally:
            job.close()
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedJob]:
    """Job on three Ray nodes, without Redis. The first test ends one, the second the head."""
    with training(tmp_path_factory.mktemp("ray"), "headless", nodes=3) as job:
        job.until(lambda view: view["world_size"] == 4)
        yield job


def test_a_ray_node_that_is_asked_to_end_hands_over_before_and_costs_no_step(
    job: WatchedJob,
) -> None:
    """SIGTERM to `ray start --block`, as Kubernetes sends it to a pod."""
    job.cluster.end_node_of(job.workers()[-1])
    after = job.until(lambda view: any("total" in one["seconds"] for one in view["incidents"]))
    (incident,) = after["incidents"]
    assert incident["steps_lost"] == 0 and incident["restored_from"] == "memory"
    assert "will be preempted" in incident["title"] and "SIGTERM" in incident["evidence"]
    # Ray may leave too little time for a new agent: then one node trains alone until it is up.
    job.until(lambda view: view["step"] > after["step"] and view["world_size"] == 4)
    # After its hand-over the agent ends by itself or is killed by its release, whichever is first.
    give_up = time.monotonic() + BOUND_S
    while not re.search(
        r"release node (node-\d) succeeded", events := job.ask("debug", "events", job.name).stdout
    ):
        assert time.monotonic() < give_up, events


def test_without_redis_only_checkpoints_outlive_the_cluster_and_a_new_one_resumes(
    job: WatchedJob,
) -> None:
    job.until(lambda view: job.committed() >= 0 and len(job.workers()) == 4)
    processes = job.processes()
    job.lose_head()
    done = job.ask("status", job.name)
    assert done.returncode == 2 and "(Connection refused)" in done.stderr, done.stderr
    assert job.command.wait(BOUND_S) != 0
    # Raylets give up on the head and end, with all their processes.
    _gone, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert alive == []
    kept = job.committed()
    with training(job.place, job.name, nodes=1) as new:
        new.trains(kept)
        events = new.ask("debug", "events", job.name).stdout
        assert f"from storage after {kept + 1} steps" in events, events


def test_with_redis_training_goes_on_and_the_new_head_finds_the_job(tmp_path: Path) -> None:
    with training(tmp_path, "durable", redis=True, nodes=2) as job:
        before = job.trains()
        processes = job.processes()
        job.lose_head()
        done = job.ask("status", "durable")
        assert done.returncode == 2 and "(Connection refused)" in done.stderr, done.stderr
        job.cluster.start_head()
        after = job.trains(before["step"] + 5)
        assert after["generation"] == before["generation"]
        assert after["num_incidents"] == before["num_incidents"]
        assert all(one.is_running() for one in processes)
        # A fault after it is recovered as any other.
        os.kill(job.workers()[-1].pid, signal.SIGKILL)
        again = job.until(lambda view: view["generation"] > after["generation"])
        assert job.trains(again["step"])["num_incidents"] == before["num_incidents"] + 1
        processes = job.processes()
        done = job.ask("cancel", "durable")
        assert done.returncode == 0, done.stderr
        _gone, alive = psutil.wait_procs(processes, timeout=BOUND_S)
        assert alive == []
