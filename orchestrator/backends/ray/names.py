"""Names of a job's actors and placement groups in a Ray cluster, as its dashboard shows them. Names
of two jobs are never the same."""

from __future__ import annotations

import re
import string

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
    """Whether an actor is this job's controller or one of its agents."""
    prefix = agent(job, "")
    node = actor.removeprefix(prefix) if actor.startswith(prefix) else ""
    return actor == controller(job) or re.fullmatch(r"node-\d+", node) is not None


def logs(job: str, job_id: str) -> str:
    """A directory in Ray's log directory, on every Ray node with a node of the job."""
    return f"holdfast-{job}-{job_id[:6]}"


def view_file(job: str) -> str:
    """In Ray's log directory."""
    return f"holdfast-{job}.view.json"


def request(job_id: str) -> str:
    """Of a file that a command uploads for the job's controller; Ray wants the suffix."""
    return f"holdfast-request-{job_id}.zip"


def uploaded_code(job_id: str, code: str) -> str:
    """Of an archive that a command uploads beside its request."""
    return f"holdfast-code-{job_id}-{code}.zip"


def answer_file(job: str, request_id: str) -> str:
    """In Ray's log directory. Raises ValueError for an id that is no hexadecimal number."""
    if not request_id or not set(request_id) <= set(string.hexdigits):
        raise ValueError(f"request id: got {request_id!r}; expected a hexadecimal number")
    return f"holdfast-{job}.answer-{request_id}.json"


def tls(job_id: str) -> str:
    """The name in a job's certificate."""
    return f"{job_id}.jobs.holdfast.dev"
