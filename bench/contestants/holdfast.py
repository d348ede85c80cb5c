"""Holdfast itself, through its command, as a user runs it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from .base import TRAIN, Contestant, Workload, kill_trees, python

NUM_RANKS = 4


AGAIN = " again"
"""End of an engine whose survivors run the script again in their process."""


class Holdfast(Contestant):
    """Four ranks on `nodes`; `spares` are warm, idle nodes. `patience_s`: after which silence is a
    fault, for who stops the job himself."""

    name = "Holdfast"

    def __init__(
        self, workload: Workload, *, nodes: int = 2, spares: int = 0, min_nodes: int = 1,
        engine: str = "holdfast", patience_s: float | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(workload)
        self._spec: dict[str, Any] = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "bench"},
            "spec": {
                "nodes": {"min": min_nodes, "max": nodes, "spares": spares},
                "workersPerNode": workload.num_ranks // nodes,
                "entrypoint": {
                    "script": str(TRAIN),
                    "args": ["--engine", engine.removesuffix(AGAIN), *workload.arguments()],
                },
                "resources": {"cpu": 1, "gpu": workload.gpu},
                "parallelism": {"shard": workload.shard},
                "checkpoint": {
                    "storage": {"everySteps": workload.save_every},
                    # `auto` may leave out steps, and the number of lost steps is compared.
                    "memory": {"everySteps": 1},
                },
                "env": {**workload.environment, **(environment or {})},
            },
        }
        keeps = engine == "kept" or engine.endswith(AGAIN)
        recovery = {"keepProcesses": "auto" if keeps else "never"}
        if patience_s is not None:
            limits = ("heartbeatTimeoutSeconds", "hangTimeoutSeconds")
            recovery |= dict.fromkeys(limits, patience_s)
        self._spec["spec"]["recovery"] = recovery

    @property
    def home(self) -> Path:
        return self.workload.directory / "home"

    def start(self) -> None:
        path = self.workload.directory / "job.yaml"
        path.write_text(yaml.safe_dump(self._spec))
        self.controller = self.spawn(self._command("run", str(path)), "holdfast.log")

    def attach(self) -> None:
        """A new controller for the job whose controller was killed."""
        self.controller = self.spawn(self._command("attach", "bench"), "attach.log")

    def kill_node(self, worker_pid: int) -> None:
        # worker -> fork server -> agent
        server = psutil.Process(worker_pid).ppid()
        psutil.Process(psutil.Process(server).ppid()).kill()

    def lose_for_good(self, rank: int, worker_pid: int) -> float:
        """Lose the node of this rank and get no replacement for the rest of the run.

        Returns when the worker was gone: the command itself needs its time before it acts.
        """
        watch = select.poll()
        watch.register(os.pidfd_open(worker_pid), select.POLLIN)
        nodes = self.call("status", "bench")["nodes"]
        (node,) = (n["name"] for n in nodes if rank in [w["rank"] for w in n["workers"]])
        order = ["debug", "kill-node", "bench", "--node", node, "--hold", "600"]
        process = subprocess.Popen(self._command(*order), stdout=subprocess.DEVNULL)
        assert watch.poll(60_000), "the node was not killed"
        gone = time.time()
        assert process.wait() == 0
        return gone

    def phases(self) -> dict[str, float]:
        incidents = self.call("status", "bench")["incidents"]
        return dict(incidents[-1]["seconds"]) if incidents else {}

    def call(self, *words: str) -> Any:
        done = subprocess.run(
            [*self._command(*words), "--json"], check=True, capture_output=True, timeout=60
        )
        return json.loads(done.stdout)

    def _command(self, *words: str) -> list[str]:
        return [python(), "-m", "holdfast.orchestrator.cli.main", *words, "--home", str(self.home)]

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
