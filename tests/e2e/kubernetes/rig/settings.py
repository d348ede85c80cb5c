"""Settings of Kubernetes: the defaults, and shorter times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Options in addition to the rig's; without any the defaults of Kubernetes apply."""

    api_server: tuple[str, ...] = ()
    controller_manager: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()
    kubelet: Mapping[str, object] = field(default_factory=dict)
    go_memory: str = "700MiB"
    """A soft limit of each server of the control plane, near what small clusters use."""


DEFAULT = Settings()

# A lost node is NotReady after 6 s instead of 47 s and its pods are deleted 5 s later instead of
# 300 s. For tests of Kubernetes itself; a user's cluster has the defaults.
SHORT = Settings(
    api_server=(
        "--default-not-ready-toleration-seconds=3",
        "--default-unreachable-toleration-seconds=3",
    ),
    controller_manager=("--node-monitor-grace-period=6s", "--node-monitor-period=1s"),
    kubelet={"nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 8},
)
