"""The parts of the spec that only one backend reads: Kubernetes and Ray."""

from __future__ import annotations

import re
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
RAY_OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
RAY_OWN_PREFIXES = ("node:", "accelerator_type:", "bundle")
RAY_NODE_ID = "ray.io/node-id"
RAY_SELECTOR_PATTERN = r"!?(in\([\w.-]+(,[\w.-]+)*\)|[\w.-]+)"
START_TIMEOUT_S = 240.0
"""A cluster autoscaler needs minutes to add a machine with GPUs."""


class Kubernetes(Part):
    """Pods of the job, on Kubernetes."""

    pod_template: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    """`metadata` and `spec` of a pod, merged over the generated pod (a strategic merge); the
    training container is called worker, and null removes a key."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Service account of the pods; its token is mounted only if the pod template asks for it."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class of the pods, which decides about preemption."""
    gpu_resource: QualifiedName = "nvidia.com/gpu"
    """Resource name of one GPU, such as nvidia.com/gpu or amd.com/gpu."""
    extended_resources: dict[
        str, Annotated[int, Field(ge=1, le=limits.MAX_QUANTITY), BeforeValidator(whole)]
    ] = Field(default_factory=dict)
    """Further resources of each pod, such as `rdma/hca_shared_devices_a: 1`."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm for data loader workers, part of the pod's memory. Default: the pod's memory
    limit."""
    topology_keys: tuple[QualifiedName, ...] = Field(default=KUBERNETES_TOPOLOGY_KEYS, max_length=8)
    """Labels of Kubernetes nodes, outermost first; neighbouring ranks share as many as possible."""
    spread: Literal["preferred", "required", "none"] = "preferred"
    """Spreading of the job's pods over Kubernetes nodes. preferred: only when no other has room;
    required: never; none: the scheduler decides."""
    gang: Literal["none", "kueue", "native"] = "none"
    """Component that places nodes.min nodes together or not at all: kueue, or native (Kubernetes
    1.36 and newer); none: Holdfast releases an incomplete gang after a while. See
    docs/operations/queues.md."""
    workload_priority_class_name: str | None = Field(default=None, max_length=253)
    """WorkloadPriorityClass that decides the order of admission, with gang kueue."""
    start_timeout_s: Seconds = START_TIMEOUT_S
    """Seconds that a pod may fail to start before it is deleted and requested again; the condition
    has the reason."""

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
    """Placement of the nodes on a Ray cluster."""

    topology_keys: tuple[QualifiedName, ...] = Field(default=RAY_TOPOLOGY_KEYS, max_length=8)
    """Labels of Ray nodes (`ray start --labels`), outermost first; neighbouring ranks share as many
    as possible."""
    accelerator_type: str | None = Field(default=None, min_length=1, max_length=63)
    """Type of the GPUs as Ray names it, such as H100 or A100-80G. Default: any."""
    custom_resources: dict[
        str, Annotated[int, Field(ge=1, le=limits.MAX_QUANTITY), BeforeValidator(whole)]
    ] = Field(default_factory=dict)
    """Further resources that each node of the job takes of its Ray node, such as `efa: 4`."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the Ray nodes to use: `value`, `!value`, `in(a,b)` or `!in(a,b)`, such as
    `ray.io/market-type: on-demand`."""

    @model_validator(mode="after")
    def _check_placement(self) -> Ray:
        for name in self.custom_resources:
            if name in RAY_OWN_RESOURCES or name.startswith(RAY_OWN_PREFIXES):
                raise ValueError(
                    f"customResources.{name}: got a resource of Ray's own; expected any other "
                    f"name; use spec.resources, or spec.ray.acceleratorType"
                )
        for key, value in self.label_selector.items():
            if key == RAY_NODE_ID:
                raise ValueError(
                    f"labelSelector: got {RAY_NODE_ID}; expected any other label; Holdfast itself "
                    f"chooses Ray nodes with it"
                )
            if not re.fullmatch(RAY_SELECTOR_PATTERN, value):
                raise ValueError(
                    f"labelSelector.{key}: got {value!r}; expected value, !value, in(a,b) or "
                    f"!in(a,b)"
                )
        return self
