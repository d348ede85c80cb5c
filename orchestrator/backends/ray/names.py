"""Names of a job's actors and placement groups in a Ray cluster, as its dashboard shows them. Names
of two jobs are never the same."""

from __future__ import annotations

import re

NAMESPACE = "holdfast"
"""Ray namespace of all actors, and the prefix of all keys in the cluster's key-value store."""


def controller(job: str) -> str:
    # A job's name has no slash, so no agent of any job has this name.
    return f"holdfast/{job}"


def agent(job: str, node: str) -> str:
    return f"{job}-{node}"


def group(job: str, node: str) -> str:
    """A placement group, named after its first node."""
    return f"{job}/{node}"


def belongs(actor: str, job: str) -> bool:
    """True if an actor is this job's controller or one of its agents."""
    prefix = agent(job, "")
    node = actor.removeprefix(prefix) if actor.startswith(prefix) else ""
    return actor == controller(job) or re.fullmatch(r"node-\d+", node) is not None


def logs(job: str, job_id: str) -> str:
    """A directory in Ray's log directory, on every Ray node with a node of the job."""
    return f"holdfast-{job}-{job_id[:6]}"


def view_file(job: str) -> str:
    """Name of the file in Ray's log directory."""
    return f"holdfast-{job}.view.json"


def tls(job_id: str) -> str:
    """The name in a job's certificate."""
    return f"{job_id}.jobs.holdfast.dev"
