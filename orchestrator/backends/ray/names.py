"""What things of a job are called in a Ray cluster, as its dashboard shows them.

Owns: those names. Must not: import ray.
"""

from __future__ import annotations

NAMESPACE = "holdfast"
"""Ray namespace of all actors, and the prefix of all keys in the cluster's key-value store."""


def controller(job: str) -> str:
    return f"holdfast-{job}"


def agent(job: str, node: str) -> str:
    return f"{job}-{node}"


def group(job: str, node: str) -> str:
    """A placement group with one bundle. The gang of a job's minimum has its first node's name."""
    return f"{job}/{node}"


def tls(job_id: str) -> str:
    """The name in a job's certificate."""
    return f"{job_id}.jobs.holdfast.dev"
