"""The parts of the spec that only one backend reads: Kubernetes and Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from holdfast.orchestrator import limits

from .base import Part, QualifiedName, Quantity, Seconds, whole

KUBERNETES_TOPOLOGY_KEYS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/block",
    "topology.kubernetes.io/rack",
    "nvidia.com/gpu.clique",
)
"""The last label names the nodes whose GPUs share one NVLink domain, as in an NVL72 rack. A domain
never spans racks, and one rack may hold several."""
RAY_TOPOLOGY_KEYS = ("ray.io/availability-region", "ray.io/availability-zone")
START_TIMEOUT_S = 240.0
"""A cluster autoscaler needs minutes to add a machine with GPUs."""


class Kubernetes(Part):
    """How the nodes of the job become pods. Only the Kubernetes backend reads it."""

    pod_template: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    """`metadata` and `spec` of a pod, merged over the pod that Holdfast makes (a strategic merge):
    mappings key by key, lists such as containers, volumes and env by name. The training container
    is called worker. null removes a key."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Service account of the pods. Its token is mounted only if the pod template asks for it."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class of the pods; it decides which pods preempt which."""
    gpu_resource: QualifiedName = "nvidia.com/gpu"
    """Resource name of one GPU, such as nvidia.com/gpu or amd.com/gpu."""
    extended_resources: dict[
        str, Annotated[int, Field(ge=1, le=limits.MAX_QUANTITY), BeforeValidator(whole)]
    ] = Field(default_factory=dict)
    """Further resources of each pod, such as `rdma/hca_shared_devices_a: 1`."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm, which data loader workers use; it counts against the pod's memory.
    Default: the pod's memory limit."""
    topology_keys: tuple[QualifiedName, ...] = Field(default=KUBERNETES_TOPOLOGY_KEYS, max_length=8)
    """Labels of Kubernetes nodes, outermost first. Neighbouring ranks share as many of them as
    possible. A label that a node lacks counts as empty."""
    spread: Literal["preferred", "required", "none"] = "preferred"
    """Whether two pods of the job may share a Kubernetes node. preferred: only when no other node
    has room; required: never; none: the scheduler decides."""
    gang: Literal["none", "kueue", "volcano", "coscheduling", "native"] = "none"
    """Gang scheduler that places nodes.min nodes together or not at all: kueue, volcano,
    coscheduling (of scheduler-plugins) or native (Kubernetes 1.36 and newer). none: Holdfast gives
    the nodes of an incomplete gang back after a while. See docs/operations/queues.md."""
    workload_priority_class_name: str | None = Field(default=None, max_length=253)
    """With gang kueue: the WorkloadPriorityClass, which decides the order of admission."""
    start_timeout_s: Seconds = START_TIMEOUT_S
    """Seconds that a pod may fail to start (unschedulable, image cannot be pulled, refused by the
    kubelet) before it is deleted and requested again, with the reason in the job's conditions."""

    @model_validator(mode="after")
    def _check_pod_template(self) -> Kubernetes:
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


class Ray(Part):
    """How the nodes of the job are placed on a Ray cluster. Only the Ray backend reads it."""

    topology_keys: tuple[QualifiedName, ...] = Field(default=RAY_TOPOLOGY_KEYS, max_length=8)
    """Labels of Ray nodes (`ray start --labels`), outermost first. Neighbouring ranks share as many
    of them as possible. A label that a node lacks counts as empty."""
