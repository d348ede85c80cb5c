"""What things of a job are called in a Ray cluster, as its dashboard shows them.

Owns: those names; those of two jobs are never the same. Must not: import ray.
"""

from __future__ import annotations

import re

NAMESPACE = "holdfast"
"""Ray namespace of all actors, and the prefix of all keys in the cluster's key-value store."""


def controller(job: str) -> str:
    # No name of a job has a slash, so no agent of any job is called so.
    return f"holdfast/{job}"


def agent(job: str, node: str) -> str:
    return f"{job}-{node}"


def group(job: str, node: str) -> str:
    """A placement group with one bundle. The gang of a job's minimum has its first node's name."""
    return f"{job}/{node}"


def belongs(actor: str, job: str) -> bool:
    """Whether an actor is this job's: its controller, or one of its agents."""
    prefix = agent(job, "")
    node = actor.removeprefix(prefix) if actor.startswith(prefix) else ""
    return actor == controller(job) or re.fullmatch(r"node-\d+", node) is not None


def tls(job_id: str) -> str:
    """The name in a job's certificate."""
    return f"{job_id}.jobs.holdfast.dev"
