"""How the nodes of a job become pods: what a cluster needs to be told beyond the rest of the spec.

Owns: these fields and their defaults. The CRD is generated from them like every other part. Must
not: know what a pod looks like; backends/kubernetes/pods.py does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from holdfast.orchestrator import limits

from .base import Part, whole
from .quantity import Quantity
from .resilience import Seconds

# Qualified names, as Kubernetes has them: an optional DNS prefix and a name.
RESOURCE_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
ResourceName = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=253)]

TOPOLOGY_KEYS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/block",
    "topology.kubernetes.io/rack",
    "nvidia.com/gpu.clique",
)
"""The last is NVIDIA's: nodes whose GPUs share one NVLink fabric, as in a rack of NVL72. A fabric
never reaches out of its rack, and a rack may be cut into several."""
START_TIMEOUT_S = 240.0
"""A cluster that grows for it needs minutes for a machine with GPUs."""


class Kubernetes(Part):
    """How the nodes of the job become pods. Only a cluster looks at it."""

    pod_template: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    """`metadata` and `spec` of a pod, merged over the pod that Holdfast would make: mappings key by
    key, lists such as containers, volumes and env by name (a strategic merge). The training
    container is called worker. null removes a key."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Service account of the pods. They never get its token unless the pod template says so."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class of the pods; it decides who is preempted for whom."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """Resource that stands for one GPU, such as nvidia.com/gpu or amd.com/gpu."""
    extended_resources: dict[
        str, Annotated[int, Field(ge=1, le=limits.MAX_QUANTITY), BeforeValidator(whole)]
    ] = Field(default_factory=dict)
    """Further resources of each pod, such as `rdma/hca_shared_devices_a: 1`."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm, for the workers of data loaders; it counts against the pod's memory.
    Without it: as much as the pod may have."""
    topology_keys: tuple[ResourceName, ...] = Field(default=TOPOLOGY_KEYS, max_length=8)
    """Labels of Kubernetes nodes, outermost first, by which ranks are laid out: neighbours in the
    order of ranks share as many of them as can be. A label that a node lacks counts as empty."""
    spread: Literal["preferred", "required", "none"] = "preferred"
    """Whether two pods of the job may share a Kubernetes node: preferred: only where there is no
    other room; required: never; none: as the scheduler likes."""
    gang: Literal["none", "kueue", "volcano", "coscheduling", "native"] = "none"
    """Who places nodes.min nodes together or not at all: kueue, volcano, coscheduling (of
    scheduler-plugins), native (Kubernetes 1.36 and newer); none: a gang that has only a part of its
    nodes gives them back after a while. See docs/operations/queues.md."""
    workload_priority_class_name: str | None = Field(default=None, max_length=253)
    """With Kueue: the WorkloadPriorityClass that decides who is admitted before whom."""
    start_timeout_s: Seconds = START_TIMEOUT_S
    """How long a pod may fail to start (unschedulable, its image cannot be pulled, refused by the
    kubelet) before it is given back and asked for anew, with the reason in the job's conditions."""

    @model_validator(mode="after")
    def _template_is_a_pod(self) -> Kubernetes:
        unknown = sorted(set(self.pod_template) - {"metadata", "spec"})
        if unknown:
            raise ValueError(
                f"podTemplate.{unknown[0]}: got an unknown key; expected metadata or spec; write "
                f"it as in a Deployment's template"
            )
        for key, value in self.pod_template.items():
            if not isinstance(value, dict):
                raise ValueError(
                    f"podTemplate.{key}: got {type(value).__name__}; expected a mapping"
                )
        return self
