"""A control plane and nodes on one network."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.e2e.kubernetes.rig import images, registry
from tests.e2e.kubernetes.rig.binaries import Binaries
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.dns import NameServer
from tests.e2e.kubernetes.rig.kubectl import Kubectl, condition
from tests.e2e.kubernetes.rig.network import Network
from tests.e2e.kubernetes.rig.node import Node
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.settings import DEFAULT, Settings

# The kubelet puts KUBERNETES_SERVICE_HOST and this port into every container; there is no
# kube-proxy, so the API server itself listens there, on the address of its own service.
SERVICE_PORT = 443


class Cluster:
    """Nodes are numbered from 1, and numbers are not reused."""

    def __init__(
        self, run: Run, binaries: Binaries, *, settings: Settings = DEFAULT, pulls: bool = False
    ) -> None:
        self.run = run
        self.network = Network(run.name)
        self.control_plane = ControlPlane(
            run,
            binaries,
            address=self.network.address,
            port=SERVICE_PORT,
            services=self.network.services,
            settings=settings,
        )
        self.nodes: dict[str, Node] = {}
        self._num_made = 0
        self.registry = registry.start(run, self.network.address) if pulls else ""
        """Host and port from which nodes pull; empty: nodes have all images but torch."""
        self.unpacked = images.unpacked(run, binaries, holdfast=not pulls)
        self._names = NameServer(self.network.address, self.control_plane.request)
        run.at_end(self._names.close)

    def start(self, num_nodes: int) -> None:
        """Return when all nodes are ready."""
        self.control_plane.start()
        self._names.start()
        for node in [self.add_node(wait=False) for _ in range(num_nodes)]:
            node.wait_ready()

    def add_node(self, labels: Mapping[str, str] | None = None, *, wait: bool = True) -> Node:
        self._num_made += 1
        node = Node(
            self.control_plane,
            self.network,
            self._num_made,
            self.unpacked,
            labels or {},
            self.registry,
        )
        self.nodes[node.name] = node
        node.start()
        if wait:
            node.wait_ready()
        return node

    def remove_node(self, node: Node) -> None:
        """End a node and delete its Node object, as a cloud provider does."""
        node.remove()
        del self.nodes[node.name]
        self.kubectl().run("delete", "node", node.name, "--ignore-not-found", "--wait=false")

    def kubectl(self, namespace: str = "") -> Kubectl:
        return self.control_plane.kubectl(namespace)

    def report(self) -> str:
        """Nodes, pods that are not ready, and the last warnings."""
        kubectl = self.kubectl()
        parts = [kubectl.attempt("get", "nodes").stdout]
        pods = kubectl.attempt("get", "pods", "--all-namespaces", "--output=json").stdout
        for pod in json.loads(pods or "{}").get("items", ()):
            if condition(pod, "Ready") != "True":
                metadata, status = pod["metadata"], pod["status"]
                kept = ("phase", "reason", "message", "conditions", "containerStatuses")
                parts.append(
                    f"pod {metadata['namespace']}/{metadata['name']} on "
                    f"{pod['spec'].get('nodeName')}, deleted {metadata.get('deletionTimestamp')}: "
                    + json.dumps({key: status[key] for key in kept if key in status})
                )
        events = kubectl.attempt(
            *("get", "events", "--all-namespaces", "--field-selector=type=Warning"),
            "--sort-by=.lastTimestamp",
        )
        return "\n".join([*parts, *events.stdout.splitlines()[-15:]])
