"""Ray Train v2, on a running cluster of several Ray nodes on this machine."""

from __future__ import annotations

import time

from tests.e2e.ray.cluster_rig import RayRig

from .base import Contestant, Workload, python

RELEASED_S = 60.0


class RayTrain(Contestant):
    """`elastic` allows half of the workers; otherwise all four are required."""

    name = "Ray Train"

    def __init__(self, workload: Workload, cluster: RayRig, *, elastic: bool = False) -> None:
        super().__init__(workload)
        self.cluster = cluster
        self._elastic = ["--elastic"] if elastic else []
        self._begun = workload.directory / "begun"

    def start(self) -> None:
        words = ["--address", self.cluster.address, "--begun", str(self._begun), *self._elastic]
        self.spawn(
            [python(), "-m", "bench.train_ray", *words, *self.workload.arguments()],
            "raytrain.log",
            RAY_TRAIN_V2_ENABLED="1",
        )

    def begun(self) -> float | None:
        """The call of fit(): importing Ray and connecting is not counted."""
        return float(self._begun.read_text())

    def controller_node(self) -> str:
        from ray.util.state import list_actors

        found = list_actors(
            filters=[("class_name", "=", "TrainController"), ("state", "=", "ALIVE")]
        )
        return str(found[0].node_id)

    def kill_node(self, worker_pid: int) -> None:
        self.cluster.kill_node(self.cluster.node_of(worker_pid))

    def stop(self) -> None:
        super().stop()
        wait_until_free(RELEASED_S)


def wait_until_free(bound_s: float) -> None:
    """Wait until the last run has released all resources. Raises TimeoutError."""
    import ray

    give_up = time.monotonic() + bound_s
    while time.monotonic() < give_up:
        total, free = ray.cluster_resources(), ray.available_resources()
        if total.get("CPU", 0.0) == free.get("CPU", 0.0):
            return
        time.sleep(0.2)
    raise TimeoutError(f"the cluster still holds {total} - {free} after {bound_s:g} s")


def wait_for_nodes(count: int, bound_s: float = RELEASED_S) -> None:
    """Wait until the head lists exactly that many Ray nodes. Raises TimeoutError."""
    import ray

    give_up = time.monotonic() + bound_s
    while time.monotonic() < give_up:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) == count:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{len(alive)} Ray nodes instead of {count} after {bound_s:g} s")
