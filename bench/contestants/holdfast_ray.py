"""Holdfast on a running Ray cluster, through its command, as a user runs it."""

from __future__ import annotations

import contextlib
import subprocess

import yaml

from tests.e2e.ray.cluster_rig import RayRig

from .base import Workload, kill_trees, python
from .holdfast import Holdfast
from .raytrain import RELEASED_S, wait_until_free


class HoldfastOnRay(Holdfast):
    """`submitted`: through the Jobs API of the cluster's dashboard instead of attached."""

    name = "Holdfast on Ray"

    def __init__(
        self, workload: Workload, cluster: RayRig, *, nodes: int = 2, spares: int = 0,
        submitted: bool = False, patience_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(workload, nodes=nodes, spares=spares, patience_s=patience_s)
        self.cluster = cluster
        self._submitted = submitted
        self._spec["spec"]["checkpoint"]["path"] = str(workload.directory / "checkpoints")

    def start(self) -> None:
        path = self.workload.directory / "job.yaml"
        path.write_text(yaml.safe_dump(self._spec))
        if self._submitted:
            words = self._words("submit", str(path), "--ray", self.cluster.dashboard)
        else:
            words = self._command("run", str(path))
        self.controller = self.spawn(words, "holdfast.log")

    def controller_node(self) -> str:
        from holdfast.orchestrator.backends.ray import actors
        from holdfast.orchestrator.hosts.ray import actor

        return str(actors.ask(actor.find("bench"), "facts")["ray_node"])

    def kill_node(self, worker_pid: int) -> None:
        self.cluster.kill_node(self.cluster.node_of(worker_pid))

    def _command(self, *words: str) -> list[str]:
        return self._words(*words, "--ray", self.cluster.address)

    def _words(self, *words: str) -> list[str]:
        return [python(), "-m", "holdfast.orchestrator.cli.main", *words]

    def stop(self) -> None:
        from holdfast.orchestrator.backends.ray import kv

        subprocess.run(self._command("cancel", "bench"), capture_output=True, timeout=60)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        kill_trees([process.pid for process in self.processes])
        wait_until_free(RELEASED_S)
        kv.JobKeyValueStore("bench").clear()
