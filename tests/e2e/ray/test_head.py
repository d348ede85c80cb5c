"""The head of a Ray cluster is lost with everything on it: with Redis behind its store the job goes
on; without, only its checkpoints outlive the cluster, and a new cluster resumes from them. And
another Ray node is asked to end."""

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


class Watched:
    """A job on such a cluster, seen by its command's words and its files only: this process is a
    driver of another cluster."""

    def __init__(self, cluster: HeadedCluster, place: Path, name: str) -> None:
        self.cluster, self.place, self.name = cluster, place, name
        self.file = place / f"{name}.yaml"
        storage = {"path": str(place / "checkpoints"), "storage": {"everySteps": 20}}
        self.file.write_text(yaml.safe_dump(spec(name, 1_000_000, checkpoint=storage)))
        self.output = place / f"{name}.log"
        self.run()

    def run(self) -> None:
        """The command that stays attached."""
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
        view: dict[str, Any] = {}
        give_up = time.monotonic() + BOUND_S
        while time.monotonic() < give_up:
            done = self.ask("status", self.name, "--json")
            view = json.loads(done.stdout) if done.returncode == 0 else {}
            if view and true(view):
                return view
        raise AssertionError(f"{view}\n{done.stderr}\n{self.output.read_text()[-3000:]}")

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
            for one in psutil.process_iter(["cmdline"])  # what is forked has its agent's
            if "holdfast.workers.agent" in (line := one.info["cmdline"] or [])
            and any(line[at : at + 2] == words for at in range(len(line)))
        ]

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.processes() if one.name().startswith("hf-rank-")]

    def close(self) -> None:
        kill_tree(self.command.pid)
        self.command.wait()


@contextmanager
def training(place: Path, name: str, *, redis: bool, nodes: int = 2) -> Iterator[Watched]:
    cluster = HeadedCluster(redis=redis, nodes=nodes)
    try:
        job = Watched(cluster, place, name)
        try:
            job.trains()
            yield job
        finally:
            job.close()
    finally:
        cluster.close()


def test_without_redis_nothing_outlives_the_cluster_but_checkpoints_and_a_new_one_resumes(
    tmp_path: Path,
) -> None:
    with training(tmp_path, "headless", redis=False) as job:
        job.until(lambda view: job.committed() >= 0)
        ours = job.processes()
        assert len(job.workers()) == 4
        job.cluster.lose_head()
        done = job.ask("status", "headless")
        assert done.returncode == 2 and "(Connection refused)" in done.stderr, done.stderr
        assert job.command.wait(BOUND_S) == 1
        told = job.output.read_text()
        assert "does not answer. Training goes on as long as" in told
        assert f"what it has committed stays in {tmp_path / 'checkpoints'}" in told
        assert "Traceback" not in told and "rpc_client.h" not in told
        # Raylets give the head up and end; with them everything that they have started.
        _gone, alive = psutil.wait_procs(ours, timeout=BOUND_S)
        assert alive == []
        kept = job.committed()
    with training(tmp_path, "headless", redis=False) as job:
        job.trains(kept)
        story = job.ask("events", "headless").stdout
        assert f"from storage after step {kept}" in story, story


def test_with_redis_training_goes_on_and_the_new_head_finds_the_job(tmp_path: Path) -> None:
    with training(tmp_path, "durable", redis=True) as job:
        before = job.trains()
        ours = job.processes()
        job.cluster.lose_head()
        done = job.ask("status", "durable")
        assert done.returncode == 2 and "(Connection refused)" in done.stderr, done.stderr
        job.cluster.start_head()
        after = job.trains(before["step"] + 5)
        assert after["generation"] == before["generation"]
        assert after["num_incidents"] == before["num_incidents"]
        assert all(one.is_running() for one in ours)
        assert job.command.poll() is None
        told = job.output.read_text()
        # More than once where a head started, and ended because its helpers were late.
        assert told.count("does not answer. Training goes on") == told.count("answers again") > 0
        # A fault after it is recovered as any other.
        os.kill(job.workers()[-1].pid, signal.SIGKILL)
        again = job.until(lambda view: view["generation"] > after["generation"])
        assert job.trains(again["step"])["num_incidents"] == before["num_incidents"] + 1
        ours = job.processes()
        done = job.ask("cancel", "durable")
        assert done.returncode == 0, done.stderr
        _gone, alive = psutil.wait_procs(ours, timeout=BOUND_S)
        assert alive == []


def test_a_ray_node_that_is_asked_to_end_hands_over_before_and_costs_no_step(
    tmp_path: Path,
) -> None:
    """SIGTERM to `ray start --block`, as whoever takes its pod away sends it."""
    with training(tmp_path, "asked", redis=False, nodes=3) as job:
        job.cluster.end_node_of(job.workers()[-1])
        after = job.until(lambda view: any("total" in one["seconds"] for one in view["incidents"]))
        (incident,) = after["incidents"]
        assert incident["steps_lost"] == 0 and incident["restored_from"] == "memory"
        assert "will be preempted" in incident["title"] and "SIGTERM" in incident["evidence"]
        # Ray may leave too little time for a new agent: then one trains alone until it is there.
        job.until(lambda view: view["step"] > after["step"] and view["world_size"] == 4)
        story = job.ask("events", "asked").stdout
        assert "its agent ended with exit code 0" in story, story
