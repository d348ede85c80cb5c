"""Holdfast itself, through its command, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import yaml

from .base import TRAIN, Contestant, Workload, kill_trees, python


class Holdfast(Contestant):
    """`spares` are warm, idle nodes; `hold_s` keeps a lost node's replacement away, so that the
    job has to shrink."""

    name = "Holdfast"

    def __init__(self, workload: Workload, *, spares: int = 0, min_nodes: int = 1) -> None:
        super().__init__(workload)
        self._spec = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "bench"},
            "spec": {
                "nodes": {"min": min_nodes, "max": 2, "spares": spares},
                "workersPerNode": 2,
                "entrypoint": {
                    "script": str(TRAIN),
                    "args": ["--engine", "holdfast", *workload.arguments()],
                },
                "resources": {"cpu": 1},
                "parallelism": {"shard": workload.shard},
                "checkpoint": {"storage": {"everySteps": workload.save_every}},
            },
        }

    @property
    def home(self) -> Path:
        return self.workload.directory / "home"

    def start(self) -> None:
        path = self.workload.directory / "job.yaml"
        path.write_text(yaml.safe_dump(self._spec))
        self.controller = self.spawn(self._command("run", str(path)), "holdfast.log")

    def attach(self) -> None:
        """A new controller for the job whose controller was killed."""
        self.controller = self.spawn(self._command("run", "--attach", "bench"), "attach.log")

    def kill_node(self, worker_pid: int) -> None:
        # worker -> fork server -> agent
        server = psutil.Process(worker_pid).ppid()
        psutil.Process(psutil.Process(server).ppid()).kill()

    def hold_replacements(self, worker_pid: int, rank: int) -> None:
        """Lose the node of this rank and get no replacement for the rest of the run."""
        self.call("chaos", "kill-node", "bench", "--rank", str(rank), "--hold", "600")

    def call(self, *words: str) -> dict[str, object]:
        import subprocess

        done = subprocess.run(
            [*self._command(*words), "--json"], check=True, capture_output=True, timeout=60
        )
        return dict(json.loads(done.stdout))

    def _command(self, *words: str) -> list[str]:
        return [python(), "-m", "orchestrator.cli.main", *words, "--home", str(self.home)]

    def stop(self) -> None:
        kill_trees([process.pid for process in self.processes])
        # The machine host and its nodes are sessions of their own: that is the point of them.
        ours = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if str(self.home) in " ".join(process.info["cmdline"] or [])
        ]
        kill_trees(ours)
        for process in self.processes:
            process.wait()
