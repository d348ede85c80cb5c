"""Names of everything of a job in the cluster: objects, labels, annotations, and how a job is
called there.

Owns: those names; the chart, the docs and the tests spell them the same way. Must not: touch the
API.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from ..api.v1alpha1 import API_VERSION, KIND


@dataclass(frozen=True)
class Owner:
    """The TrainingJob object behind a job."""

    namespace: str
    name: str
    uid: str

    @property
    def key(self) -> str:
        return job_key(self.namespace, self.name)


GROUP, _, VERSION = API_VERSION.partition("/")
PLURAL = "trainingjobs"

LABEL_JOB = "holdfast.dev/job"
LABEL_ROLE = "holdfast.dev/role"
LABEL_RANK = "holdfast.dev/rank"
"""Lowest rank on the pod, of the current generation; spares have none."""
LABEL_GENERATION = "holdfast.dev/generation"
ROLE_NODE = "node"

CANCEL = "holdfast.dev/cancel"
"""Annotation of a TrainingJob: end it for good; its value says who asks."""
CHAOS = "holdfast.dev/chaos"
"""Annotation: a rehearsal as JSON, `{"kind": ..., "rank": ..., "node": ..., "by": ..., "id": ...}`.
The operator carries it out and removes it."""
CHECKPOINT = "holdfast.dev/checkpoint"
"""Annotation: write a checkpoint now; its value says who asks. Removed when asked for."""
BLAMED = "holdfast.dev/blamed"
"""Annotation of a pod: JSON {name of a blamed node of the job: the Kubernetes node it was on}, so
that a later operator still knows where the job's next pods must not go."""

CONTAINER = "worker"
FIELD_MANAGER = "holdfast-operator"

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""As Kubernetes has them: no vowels, so that no words come out; nothing that looks like another."""
SUFFIX_LENGTH = 5


def job_key(namespace: str, name: str) -> str:
    """How the endpoint, the agents and the logs call a job of the cluster."""
    return f"{namespace}/{name}"


def new_node_name(job: str) -> str:
    """A name for a pod, which is a node of the job; one in 14 million is drawn twice, and then the
    API server refuses it."""
    return f"{job}-{''.join(secrets.choice(_LETTERS) for _ in range(SUFFIX_LENGTH))}"


def secret_name(job: str) -> str:
    return f"{job}-agents"


def journal_name(job: str) -> str:
    return f"{job}-journal"


def tls_name(uid: str) -> str:
    """The name in the job's certificate, by which the operator tells jobs apart."""
    return f"{uid}.jobs.holdfast.dev"


def selector(job: str) -> str:
    """Label selector of a job's nodes."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_NODE}"


ALL_NODES = f"{LABEL_JOB},{LABEL_ROLE}={ROLE_NODE}"
"""Label selector of the nodes of all jobs."""


def owner_reference(name: str, uid: str) -> dict[str, Any]:
    """Makes an object go when its TrainingJob goes."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
