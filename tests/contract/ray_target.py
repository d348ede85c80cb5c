"""The contract suite's Ray cluster: nodes are actors on several raylets of this machine."""

from __future__ import annotations

from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.backends.base import Backend

from ..e2e.ray import cluster_rig


class RayContractTarget:
    """Target whose agents cannot connect to a controller: the contract is about nodes only."""

    def __init__(self, job: TrainingJob, directory: Path) -> None:
        from holdfast.orchestrator.backends.ray import kv, names
        from holdfast.orchestrator.protocol.certificate import make_keys

        cluster_rig.connected()
        self.job, self.job_id = job, "0123456789abcdef"
        self.keys = kv.JobKeyValueStore(job.name)
        self.secrets = make_keys(names.tls(self.job_id))

    def make(self) -> Backend:
        from holdfast.orchestrator.backends.ray.backend import RayBackend

        return RayBackend(self.job, self.job_id, self.keys, self.secrets)

    def agent_pid(self, node: str) -> int | None:
        import ray

        from holdfast.orchestrator.backends.ray import actors

        actor = actors.find_agent(self.job.name, node)
        return None if actor is None else int(ray.get(actor.facts.remote(), timeout=90)["pid"])

    def leftovers(self) -> list[str]:
        import ray

        actors = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith(f"{self.job.name}-")
        ]
        return [*actors, *cluster_rig.group_names(self.job.name)]

    def close(self) -> None:
        self.keys.clear()  # the cluster is shared by all tests
