"""Ray's state API over HTTP: what `ray list actors` and `ray logs` use. It reads the dashboard, so
it needs no connection to the cluster and starts nothing there."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlencode

from . import names
from .jobs_api import without_overrides

TIMEOUT_S = 5
MAX_RAY_NODES = 100
"""More of them are asked from inside the cluster, all at once."""


class ControllerProcess(NamedTuple):
    ray_node: str
    pid: int


class StateApi:
    """The state API of one cluster. Every method raises what Ray and requests raise: callers have
    another way."""

    def __init__(self, address: str) -> None:
        """`address`: of a dashboard."""
        from ray.util.state.api import StateApiClient

        with without_overrides(wanted=True):
            self._client: Any = StateApiClient(address)

    def controller(self, job: str) -> ControllerProcess | None:
        """The process of a job's controller; None: no such actor is alive."""
        from ray.util.state.common import ListApiOptions, StateResource

        wanted = {
            "name": names.controller(job),
            "ray_namespace": names.NAMESPACE,
            "state": "ALIVE",
        }
        filters = [(key, "=", value) for key, value in wanted.items()]
        options = ListApiOptions(limit=10, timeout=TIMEOUT_S, filters=filters)
        actors = self._client.list(
            StateResource.ACTORS, options=options, raise_on_missing_output=False
        )
        if len(actors) != 1 or not actors[0].node_id or not actors[0].pid:
            return None
        return ControllerProcess(str(actors[0].node_id), int(actors[0].pid))

    def ray_nodes(self) -> list[str]:
        """Ids of those that are alive. Raises ValueError if they are more than MAX_RAY_NODES."""
        from ray.util.state.common import ListApiOptions, StateResource

        filters = [("state", "=", "ALIVE")]
        options = ListApiOptions(limit=MAX_RAY_NODES + 1, timeout=TIMEOUT_S, filters=filters)
        # Ray would count nodes that are dead, and so filtered out, as missing from its answer.
        nodes = self._client.list(
            StateResource.NODES, options=options, raise_on_missing_output=False
        )
        if len(nodes) > MAX_RAY_NODES:
            raise ValueError(f"more than {MAX_RAY_NODES} Ray nodes are alive")
        return [str(ray_node.node_id) for ray_node in nodes]

    def log_files(self, ray_node: str, glob: str) -> list[str]:
        """Names of files in a Ray node's log directory, as `ray.util.state.list_logs` lists them,
        which takes no address of a dashboard."""
        asked = {"node_id": ray_node, "glob": glob, "timeout": TIMEOUT_S}
        answer = self._client._do_request(
            "GET", f"/api/v0/logs?{urlencode(asked)}", timeout=2 * TIMEOUT_S
        )
        answer.raise_for_status()
        kinds: dict[str, list[str]] = answer.json()["data"]["result"]
        return sorted({name for listed in kinds.values() for name in listed})

    def log_file(self, ray_node: str, name: str) -> bytes:
        """A file of the Ray node's log directory, as `ray.util.state.get_log` reads it, which takes
        no address of a dashboard."""
        asked = {"node_id": ray_node, "filename": name, "lines": -1, "timeout": TIMEOUT_S}
        answer = self._client._do_request(
            "GET", f"/api/v0/logs/file?{urlencode(asked)}", timeout=2 * TIMEOUT_S
        )
        answer.raise_for_status()
        content: bytes = answer.content
        return content
