"""What a job's backend knows of its pods beside the feed.

Owns: that memory, and which Kubernetes nodes are to blame. Must not: touch the API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.errors import ApiError, Forbidden

from . import pod_conditions
from .job_secret import KeysUnusable

NO_ROOM = "NoRoom"
REFUSAL_S = 30.0
"""Whoever still wants nodes asks every few seconds; a refusal that nobody hears again is over."""


@dataclass(frozen=True)
class Refusal:
    """Why no pods are made, and until when none are even tried."""

    why: str = ""
    until_s: float = 0.0
    code: str = NO_ROOM
    """CamelCase: the reason in the job's conditions."""
    of_size: bool = False
    """So many pods were refused; fewer may not be."""

    @classmethod
    def of(cls, count: int, error: HoldfastError, until_s: float, made: int = 0) -> Refusal:
        """Of so many pods, some of which may have been made. The API server's own words, but where
        somebody has to act: then which right or which Secret it is, and what to do."""
        code, why = NO_ROOM, error.message if isinstance(error, ApiError) else str(error)
        if isinstance(error, Forbidden) and error.right_missing:
            code, why = "MissingRight", str(error)
        elif isinstance(error, KeysUnusable):
            code = "KeysUnusable"
        asked = "1 pod was" if count == 1 else f"{count} pods were"
        came = f"only {made} made" if made else "none was made"
        return cls(f"{asked} asked for and {came}: {why}", until_s, code, of_size=True)

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.until_s - now_s)

    def text(self, now_s: float) -> str:
        """Empty: nothing was refused lately."""
        return self.why if now_s < self.until_s + REFUSAL_S else ""


@dataclass
class PodTracker:
    """What a job's controller knows of its pods beside the feed."""

    creating: set[str] = field(default_factory=set)
    """Asked for, and not seen in the feed yet."""
    told: set[str] = field(default_factory=set)
    """Those whose end has been told."""
    noticed: set[str] = field(default_factory=set)
    """Those that are being taken away, told."""
    released: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    """Those that have finished a step, told or read from their labels."""
    place: dict[str, str] = field(default_factory=dict)
    """Pod -> Kubernetes node, of all that were ever seen."""

    def here(self, pods: Mapping[str, dict[str, Any]]) -> set[str]:
        """Nodes that there are or that are being made; those behind a gate count."""
        ending = {
            n
            for n, pod in pods.items()
            if pod_conditions.is_over(pod) or pod_conditions.is_leaving(pod)
        }
        return {*pods, *self.creating} - ending - self.told - self.released

    def blamed(self, avoid: tuple[str, ...], pods: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Blamed node of the job -> Kubernetes node, also from before our time."""
        found: dict[str, str] = {}
        for pod in pods.values():
            text = pod["metadata"].get("annotations", {}).get(names.BLAMED)
            found |= json.loads(text) if text else {}
        return found | {node: self.place[node] for node in avoid if self.place.get(node)}

    def doubtful(self, pods: Mapping[str, dict[str, Any]]) -> set[str]:
        """Kubernetes nodes with a pod that was given up and whose end nobody has confirmed: a dead
        machine looks so for the better part of a minute, and is the emptiest of all till then."""
        left = [pod for name, pod in pods.items() if name in self.released]
        return {
            pod_conditions.place(pod)
            for pod in left
            if pod_conditions.place(pod) and not pod_conditions.is_over(pod)
        }
