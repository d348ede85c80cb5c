"""Signs that an autoscaler is adding machines for pods that cannot be scheduled.

cluster-autoscaler records the Event TriggeredScaleUp on such a pod, Karpenter the Event Nominated;
a scheduler or autoscaler that has chosen a node writes status.nominatedNodeName. Sources:
https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md (what events are
emitted), https://karpenter.sh/docs/troubleshooting/ (Nominated).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set

from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import EVENTS, ApiError
from holdfast.orchestrator.kube.names import Document

REASONS = ("TriggeredScaleUp", "Nominated")

log = logging.getLogger("holdfast.kubernetes")


def nominated(pods: Mapping[str, Document]) -> set[str]:
    """Pods for which a node was chosen that is not free or not there yet."""
    return {name for name, pod in pods.items() if pod.get("status", {}).get("nominatedNodeName")}


async def provisioned_for(cluster: KubeClient, namespace: str, pods: Set[str]) -> set[str]:
    """Pods for which an autoscaler adds a machine; empty where Events cannot be read."""
    names_of_pods: set[str] = set()
    for reason in REASONS:
        fields = f"involvedObject.kind=Pod,reason={reason}"
        try:
            events, _version = await cluster.list_all(EVENTS, namespace, fields=fields)
        except ApiError as error:
            log.info("Events of autoscalers cannot be read: %s", error)
            return names_of_pods
        names_of_pods |= {str(event["involvedObject"]["name"]) for event in events}
    return names_of_pods & pods
