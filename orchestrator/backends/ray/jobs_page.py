"""What the Jobs view of Ray's dashboard says of a job while it runs: status message and metadata.

Owns: the entry of the Ray job that this process is the driver of. Must not: know what it says.

The Jobs API takes metadata at submission only. The entry itself is JSON in the cluster's key-value
store, which the job server, `ray job` and the dashboard read anew every time, and which Ray's own
processes leave alone from the driver's start to its end: that is when, and only when, its driver
may write it. The key is shared by Ray's Python and C++ sides (JobDataKey in gcs_job_manager.h).
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

KEY = "_ray_internal_job_info_{}"
NAMESPACE = b"job"
CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's job server sets it for a driver; no other process has one of its own."""
OWNER = "holdfast_job"
"""Metadata key: the entry is this job's, and not of a program that happens to run one."""

log = logging.getLogger("holdfast.ray")


def submission_id() -> str:
    """Of the Ray job that this process belongs to; empty outside of one."""
    try:
        metadata = json.loads(os.environ.get(CONFIG, "{}")).get("metadata", {})
    except ValueError:
        return ""
    return str(metadata.get("job_submission_id", ""))


class JobsPageEntry:
    """One Ray job's. Does nothing where this process is not the driver of a submitted job."""

    def __init__(self, job: str, metadata: dict[str, str]) -> None:
        """`metadata`: what is not in the entry already, as of a job that Holdfast did not submit
        (a RayJob of KubeRay)."""
        self._job, self._id, self._lacking = job, submission_id(), metadata

    def tell(self, message: str, metadata: dict[str, str]) -> None:
        """Blocks for two round trips. What cannot be told is not worth the job's driver."""
        if not self._id:
            return
        try:
            self._tell(message, metadata)
        except Exception as error:  # Ray's own RpcError, or RuntimeError, depending on its version
            log.warning("Ray's Jobs view cannot be told of job %s: %s", self._job, error)

    def _tell(self, message: str, metadata: dict[str, str]) -> None:
        from ray.experimental import internal_kv

        key = KEY.format(self._id).encode()
        data = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        entry: dict[str, Any] = json.loads(data) if data else {}
        known = entry.get("metadata") or {}
        if entry.get("status") != "RUNNING" or known.get(OWNER) != self._job:
            self._id = ""  # ended or deleted meanwhile, or somebody else's
            return
        entry |= {"message": message, "metadata": {**self._lacking, **known, **metadata}}
        value = json.dumps(entry).encode()
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)
