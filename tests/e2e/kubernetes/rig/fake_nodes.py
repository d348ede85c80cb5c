"""Node objects without machines: the real scheduler binds pods to them, and the pods stay Pending.

The control plane needs the settings below so that it does not treat such nodes as dead. A pod on
such a node is only removed at once with a grace of 0.
"""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.settings import Settings

SETTINGS = Settings(
    # A new node is tainted until its kubelet reports, and these have no kubelet.
    api_server=("--disable-admission-plugins=TaintNodesByCondition",),
    controller_manager=("--controllers=*,-node-lifecycle-controller,-taint-eviction-controller",),
)
CAPACITY = {"cpu": "1000", "memory": "4Ti", "pods": "1000", "ephemeral-storage": "1Ti"}
AT_ONCE = 100
"""Nodes per call of kubectl."""


def add(kubectl: Kubectl, count: int, capacity: dict[str, str] | None = None) -> None:
    """Create nodes fake-0000, fake-0001, ..., all Ready, in zones of 16."""
    for first in range(0, count, AT_ONCE):
        items = [node(index, capacity or CAPACITY) for index in range(first, count)[:AT_ONCE]]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        kubectl.run("create", "--filename=-", stdin=text)


def node(index: int, capacity: dict[str, str]) -> dict[str, Any]:
    name = f"fake-{index:04d}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "topology.kubernetes.io/zone": f"zone-{index // 16}",
            },
        },
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Fake",
                    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        },
    }
