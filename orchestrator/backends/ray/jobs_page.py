"""Status message and metadata of a running job on the Jobs page of Ray's dashboard.

The Jobs API accepts metadata at submission only. The entry of a Ray job is JSON in the cluster's
key-value store (JobDataKey in Ray's gcs_job_manager.h), which is not a public API. The job server,
`ray job` and the dashboard read it again every time, and Ray does not write it while the job's
driver runs: that driver may. Where a Ray release changes this, the page lacks our text and nothing
else happens.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

OWNER = "holdfast_job"
"""Metadata key with the job's name: without it, the Ray job is another program that runs a job."""

log = logging.getLogger("holdfast.ray")


def submission_id() -> str:
    """Of the Ray job that this process belongs to; empty outside of one."""
    try:
        # Ray's job server sets it for a driver; no other process has it.
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    except ValueError:
        return ""
    return str(config.get("metadata", {}).get("job_submission_id", ""))


class JobsPageEntry:
    """One Ray job's. Does nothing where this process is not the driver of a submitted job."""

    def __init__(self, job: str, defaults: dict[str, str]) -> None:
        """`defaults`: metadata that an entry may lack, as of a Ray job that Holdfast did not submit
        (a RayJob of KubeRay)."""
        self._job, self._id, self._defaults = job, submission_id(), defaults

    def write(self, message: str, metadata: dict[str, str]) -> None:
        """Blocks for two round trips."""
        if not self._id:
            return
        try:
            self._write(message, metadata)
        except Exception as error:  # Ray's own RpcError, or RuntimeError, depending on its version
            log.warning("job %s: Ray's Jobs page was not updated: %s", self._job, error)

    def _write(self, message: str, metadata: dict[str, str]) -> None:
        from ray.experimental import internal_kv

        key = f"_ray_internal_job_info_{self._id}".encode()
        data = internal_kv._internal_kv_get(key, namespace=b"job")
        entry: dict[str, Any] = json.loads(data) if data else {}
        known = entry.get("metadata") or {}
        if entry.get("status") != "RUNNING" or known.get(OWNER) != self._job:
            self._id = ""  # ended or deleted meanwhile, or not this job's
            return
        entry |= {"message": message, "metadata": {**self._defaults, **known, **metadata}}
        value = json.dumps(entry).encode()
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=b"job")
