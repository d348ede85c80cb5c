"""Names of a job's objects, labels and annotations in the cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.v1alpha1 import API_VERSION, KIND

Document = dict[str, Any]
"""An object of the API, as parsed JSON."""


@dataclass(frozen=True)
class Owner:
    """The TrainingJob object behind a job."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def owns(self, document: Mapping[str, Any]) -> bool:
        """The object belongs to this job and not to an earlier one of the same name."""
        references = document["metadata"].get("ownerReferences") or ()
        return any(reference.get("uid") == self.uid for reference in references)


GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL = "trainingjobs"

LABEL_JOB = "holdfast.dev/job"
LABEL_ROLE = "holdfast.dev/role"
LABEL_RANK = "holdfast.dev/rank"
"""The lowest rank on the pod in the current generation; spares have none."""
LABEL_GENERATION = "holdfast.dev/generation"
ROLE_NODE = "node"

CANCEL = "holdfast.dev/cancel"
"""Annotation of a TrainingJob: cancel it; the value names the user."""
REQUEST = "holdfast.dev/request"
"""Annotation: a request for the running job, `{"verb": ..., "arguments": {...}, "by": ..., "id":
...}`: checkpoint, chaos, or the resume of a job that holds. The operator removes it and carries it
out; status.request has its answer."""
BLAMED = "holdfast.dev/blamed"
"""Annotation of a pod: JSON {blamed node of the job: its Kubernetes node}, so that a later operator
still keeps the job's pods away from those Kubernetes nodes."""

INCIDENT = "holdfast.dev/incident"
"""Annotation of an Event: number of the incident that it is about."""

CONTAINER = "worker"
FIELD_MANAGER = "holdfast-operator"

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Letters as Kubernetes generates names: no vowels, so no words; no letters that look alike."""
SUFFIX_LENGTH = 5


def new_node_name(job: str) -> str:
    """A random pod name; one in 14 million is drawn twice, and the API server rejects that one."""
    return f"{job}-{''.join(secrets.choice(_LETTERS) for _ in range(SUFFIX_LENGTH))}"


def secret_name(job: str) -> str:
    return f"{job}-agents"


def secret_copy_name(job: str) -> str:
    """A second Secret with the same content, for when a user deletes the first."""
    return f"{job}-agents-copy"


def journal_name(job: str) -> str:
    return f"{job}-journal"


def tls_name(uid: str) -> str:
    """The name in the job's certificate, by which the operator recognizes the job."""
    return f"{uid}.jobs.holdfast.dev"


def selector(job: str) -> str:
    """The label selector of a job's nodes."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_NODE}"


ALL_NODES = f"{LABEL_JOB},{LABEL_ROLE}={ROLE_NODE}"
"""The label selector of the nodes of all jobs."""


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """The API server deletes an object together with its owner."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
