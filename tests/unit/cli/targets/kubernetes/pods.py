"""Pods of a job as the API server returns them."""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.kube.client import Document


def pod(name: str, *, rank: str = "", generation: str = "1", **status: Any) -> Document:
    labels = {"holdfast.dev/rank": rank, "holdfast.dev/generation": generation} if rank else {}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": "host-1"},
        "status": {"phase": "Running", "podIP": "10.0.0.7", **status},
    }
