"""The pod of a node, from the TrainingJob. Pure.

The pod satisfies the "restricted" pod security standard. The job's podTemplate is merged over it.
Afterwards the fields are set that make it a node of this job: name, labels, owner, the agent's
command and the restart policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.base import parse_quantity
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.strategic_merge import merge
from holdfast.orchestrator.protocol.environment import CACHE_VARIABLE

from . import shared_volumes
from .shared_volumes import SharedVolume

RUN_AS = 65532
"""The user `nonroot` of common base images; a restricted pod may not run as root."""
SECRETS = "/var/run/holdfast/agents"
LOGS = "-"
"""Workers write to the pod's output, for `kubectl logs`."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
ANTI_AFFINITY_WEIGHT = 100
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
GRACE_MARGIN_S = 5.0
"""Seconds beside the job's own grace: the agent has to collect its workers and disconnect."""

DOWNWARD = {
    "POD_NAME": "metadata.name",
    "POD_NAMESPACE": "metadata.namespace",
    "POD_IP": "status.podIP",
    "NODE_NAME": "spec.nodeName",
}


@dataclass(frozen=True)
class PodSettings:
    """The operator's settings for the pods of all jobs."""

    endpoint: str
    """HOST:PORT[,HOST:PORT...] where agents find the operator."""
    image: str = ""
    """Image of jobs whose spec names none."""
    image_pull_policy: str = ""
    """Empty for the default of Kubernetes."""
    requests: Mapping[str, str] = field(default_factory=dict)
    """Resource -> quantity that a pod requests per worker where the job says nothing."""
    checkpoint_volume: Mapping[str, Any] = field(default_factory=dict)
    """A volume source, such as {"persistentVolumeClaim": {"claimName": "checkpoints"}}, of which
    each pod gets the directory of its own job."""
    checkpoint_root: str = ""
    """Directory or URL below which jobs without a checkpoint.path keep their checkpoints; where the
    operator mounts the volume."""
    checkpoint_prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Namespace, or * for all -> further directories and URLs below which the operator opens the
    paths of jobs with its own credentials (hosts/kubernetes/storage_access.py)."""
    user_credentials: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Namespace, or * for all, whose jobs may use other S3 buckets with credentials of their own ->
    endpoints that these may name beside AWS, or * for any."""
    notify_hosts: Sequence[str] = ()
    """Hosts that the operator sends messages of spec.notify to; * for any."""
    cache_volume: Mapping[str, Any] = field(default_factory=dict)
    """A volume source: each pod keeps what compilers produce in the directory of its namespace."""


def pod_document(
    job: TrainingJob,
    owner: Owner,
    settings: PodSettings,
    node: str,
    blamed: Mapping[str, str] | None = None,
    doubtful: Iterable[str] = (),
    known_path: str = "",
) -> dict[str, Any]:
    """The pod of node `node`. `blamed`: node of the job -> Kubernetes node that must not be used
    again. `doubtful`: Kubernetes nodes that may be dead before Kubernetes has noticed; they are
    used only as a last resort. `known_path`: where the job's checkpoints are already.

    Raises UserError for a template that leaves no container, or that mounts checkpoints of other
    jobs."""
    blamed = blamed or {}
    volumes = (
        shared_volumes.checkpoints(
            settings.checkpoint_volume,
            settings.checkpoint_root,
            f"{owner.namespace}/{owner.name}",
            checkpoint_path(job, settings, known_path),
        ),
        shared_volumes.compile_cache(settings.cache_volume, owner.namespace),
    )
    ours: dict[str, Any] = {
        "metadata": {"labels": dict(job.metadata.labels), "annotations": {}},
        "spec": _spec(job, owner, settings, [volume for volume in volumes if volume.mount]),
    }
    pod: dict[str, Any] = merge(ours, job.spec.kubernetes.pod_template)
    _add_requests(pod["spec"], settings.requests, job.spec.workers_per_node)
    shared_volumes.check(pod["spec"], volumes)
    metadata = pod["metadata"]
    metadata["name"], metadata["namespace"] = node, owner.namespace
    metadata.pop("generateName", None)
    metadata["labels"] = {**metadata.get("labels", {}), **_labels(owner)}
    if blamed:
        text = json.dumps(dict(sorted(blamed.items())))
        metadata["annotations"] = {**metadata.get("annotations", {}), names.BLAMED: text}
    metadata["ownerReferences"] = [names.owner_reference(owner.name, owner.uid)]
    pod["spec"]["restartPolicy"] = "Never"
    _require_other_nodes(pod["spec"], set(blamed.values()))
    _prefer_other_nodes(pod["spec"], set(doubtful) - set(blamed.values()))
    worker = _container(pod["spec"])
    worker["args"] = _arguments(job, owner, settings, node)
    grace_s = pod["spec"].get("terminationGracePeriodSeconds")
    if isinstance(grace_s, int) and grace_s > 0:
        # The template may have changed it.
        worker["args"] += ["--grace", str(grace_s)]
    worker.setdefault("command", ["python"])
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def _labels(owner: Owner) -> dict[str, str]:
    return {
        names.LABEL_JOB: owner.name,
        names.LABEL_ROLE: names.ROLE_NODE,
        "app.kubernetes.io/managed-by": "holdfast",
    }


def agent_command(pod: dict[str, Any]) -> list[str]:
    """The command line of a pod's agent."""
    container = _container(pod["spec"])
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _container(spec: dict[str, Any]) -> dict[str, Any]:
    for container in spec.get("containers") or ():
        if isinstance(container, dict) and container.get("name") == names.CONTAINER:
            return container
    field = "spec.kubernetes.podTemplate.spec.containers"
    raise UserError.of(field, f"none called {names.CONTAINER}", "the training container")


def _arguments(job: TrainingJob, owner: Owner, settings: PodSettings, node: str) -> list[str]:
    options = {
        "--job": owner.key,
        "--node": node,
        "--slots": str(job.spec.workers_per_node),
        "--token-file": f"{SECRETS}/token",
        "--endpoint": settings.endpoint,
        "--tls": SECRETS,
        "--tls-name": names.tls_name(owner.uid),
    }
    # -P: the working directory belongs to the user, see protocol/python_command.py.
    return ["-P", "-m", "holdfast.workers.agent", *(w for pair in options.items() for w in pair)]


def _spec(
    job: TrainingJob, owner: Owner, settings: PodSettings, shared: Sequence[SharedVolume]
) -> dict[str, Any]:
    wanted = job.spec.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(
            job.spec.recovery.termination_grace_s + GRACE_MARGIN_S
        ),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": RUN_AS,
            "runAsGroup": RUN_AS,
            "fsGroup": RUN_AS,
            # Otherwise each new pod waits until the owner of every file of its claims was changed.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_worker(job, settings, shared)],
        "volumes": _volumes(job, owner, shared),
    }
    if wanted.service_account_name is not None:
        spec["serviceAccountName"] = wanted.service_account_name
    if wanted.priority_class_name is not None:
        spec["priorityClassName"] = wanted.priority_class_name
    affinity = _affinity(job, owner)
    if affinity:
        spec["affinity"] = affinity
    return spec


def _worker(
    job: TrainingJob, settings: PodSettings, shared: Sequence[SharedVolume]
) -> dict[str, Any]:
    has_cache = any(volume.name == shared_volumes.CACHE for volume in shared)
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": job.spec.image or settings.image,
        "env": [
            *(
                {"name": n, "valueFrom": {"fieldRef": {"fieldPath": p}}}
                for n, p in DOWNWARD.items()
            ),
            # The image need not have a passwd entry or a home directory for its user.
            {"name": "HOME", "value": "/tmp"},
            {"name": "USER", "value": "holdfast"},
            *([{"name": CACHE_VARIABLE, "value": shared_volumes.CACHE_DIRECTORY}] * has_cache),
        ],
        "resources": _resources(job),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
        },
        "volumeMounts": [
            {"name": "agents", "mountPath": SECRETS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(dict(volume.mount) for volume in shared),
        ],
        # The last log lines of a failed agent become the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if job.spec.checkpoint.secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": job.spec.checkpoint.secret_name}}]
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    return container


def _resources(job: TrainingJob) -> dict[str, Any]:
    """The resources of a worker times the workers of a node. Memory is limited to its request. CPU
    has no limit, because a throttled worker delays all others."""
    each, count = job.spec.resources, job.spec.workers_per_node
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if each.cpu is not None:
        requests["cpu"] = f"{math.ceil(each.cpu * count * 1000)}m"
    if each.memory is not None:
        requests["memory"] = limits["memory"] = str(math.ceil(each.memory * count))
    if each.num_gpus:
        limits[job.spec.kubernetes.gpu_resource] = str(each.num_gpus * count)
    for name, amount in sorted(job.spec.kubernetes.extended_resources.items()):
        limits[name] = str(amount)
    requirements = {"requests": requests, "limits": limits}
    return {name: amounts for name, amounts in requirements.items() if amounts}


def _add_requests(spec: dict[str, Any], each: Mapping[str, str], count: int) -> None:
    """The operator's defaults. A limit alone is a request, too."""
    if not each:
        return
    resources = _container(spec).setdefault("resources", {})
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    missing = {name: amount for name, amount in each.items() if name not in amounts}
    if missing:
        requests = {name: _times(name, amount, count) for name, amount in missing.items()}
        resources["requests"] = {**(resources.get("requests") or {}), **requests}


def _times(name: str, amount: str, count: int) -> str:
    total = parse_quantity(amount) * count
    return f"{math.ceil(total * 1000)}m" if name == "cpu" else str(math.ceil(total))


def _volumes(
    job: TrainingJob, owner: Owner, shared: Sequence[SharedVolume]
) -> list[dict[str, Any]]:
    memory: dict[str, Any] = {"medium": "Memory"}
    if job.spec.kubernetes.shared_memory is not None:
        memory["sizeLimit"] = str(math.ceil(job.spec.kubernetes.shared_memory))
    secret = {"secretName": names.secret_name(owner.name), "defaultMode": 0o440}
    return [
        {"name": "agents", "secret": secret},
        {"name": "shm", "emptyDir": memory},
        *(volume.document for volume in shared),
    ]


def checkpoint_path(job: TrainingJob, settings: PodSettings, known_path: str = "") -> str:
    """Place of the job's checkpoints. `known_path`: place of a started job's checkpoints, which do
    not move when the operator is started with another root."""
    if job.spec.checkpoint.path is not None:
        return job.spec.checkpoint.path
    root = settings.checkpoint_root.rstrip("/")
    return known_path or "/".join([root, job.metadata.namespace, job.name])


def _affinity(job: TrainingJob, owner: Owner) -> dict[str, Any]:
    term = {
        "topologyKey": HOSTNAME_LABEL,
        "labelSelector": {"matchLabels": {names.LABEL_JOB: owner.name}},
    }
    match job.spec.kubernetes.spread:
        case "required":
            return {"podAntiAffinity": {REQUIRED: [term]}}
        case "preferred":
            weighted = {"weight": ANTI_AFFINITY_WEIGHT, "podAffinityTerm": term}
            return {"podAntiAffinity": {PREFERRED: [weighted]}}
        case "none":
            return {}


def _require_other_nodes(spec: dict[str, Any], excluded: set[str]) -> None:
    """Exclude Kubernetes nodes, in addition to the affinity of the template. By name, not by
    hostname label: the two may differ."""
    if not excluded:
        return
    fields = _none_of(excluded)
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    # Terms are alternatives, so each of them needs the exclusion.
    terms = affinity.setdefault(REQUIRED, {}).setdefault("nodeSelectorTerms", [])
    for term in terms or [{}]:
        term["matchFields"] = [*term.get("matchFields", []), *fields]
        if term not in terms:
            terms.append(term)


def _prefer_other_nodes(spec: dict[str, Any], doubtful: set[str]) -> None:
    if not doubtful:
        return
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    other = {"weight": ANTI_AFFINITY_WEIGHT, "preference": {"matchFields": _none_of(doubtful)}}
    affinity[PREFERRED] = [*affinity.get(PREFERRED, []), other]


def _none_of(nodes: set[str]) -> list[dict[str, Any]]:
    return [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in sorted(nodes)]
