"""What the backends of all jobs of an operator share.

Owns: that list. Must not: do anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.orchestrator.kube.client import KubeClient

from .gang_arbiter import GangArbiter
from .node_informer import NodeInformer
from .pod_informer import PodInformer
from .pods import PodSettings


@dataclass
class OperatorContext:
    """What the backends of all jobs of an operator share."""

    cluster: KubeClient
    feed: PodInformer
    places: NodeInformer
    gangs: GangArbiter
    settings: PodSettings
