"""Where a job's storage is, and the environment in which its store's driver looks for credentials.

Owns: the one reading of spec.checkpoint.path, and spec.env for the processes of the control plane
that open the store. Must not: open it.

Agents and workers have spec.env from their start. Controller and command line read and write the
same store, so they need the same endpoint and credentials, for as long as they work for this job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.errors import Problem
from holdfast.orchestrator.protocol import files

LOCAL_SCHEMES = ("file", "local")
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""URL scheme -> the extra of Holdfast that installs its driver."""

CHECKPOINT_FIELD = "spec.checkpoint.path"


def storage_place(path: str, spec_directory: str | Path) -> str:
    """Absolute directory, or URL, of a written checkpoint path. Directories are relative to the
    spec file, with or without file://: every process of the job has another working directory."""
    scheme, is_url, rest = path.partition("://")
    if is_url and scheme not in LOCAL_SCHEMES:
        return path
    return str(files.resolve(spec_directory, rest if is_url else path).resolve())


def missing_driver(path: str, error: Exception) -> Problem:
    """The store's driver cannot be imported: which one, and how to get it."""
    scheme = path.partition("://")[0]
    fix = "install that driver where the job runs, and here"
    if scheme in EXTRAS:
        fix = f"pip install '.[{EXTRAS[scheme]}]' in a checkout of Holdfast"
    return Problem(CHECKPOINT_FIELD, f"{path} ({error})", "a URL whose driver is installed", fix)


@contextmanager
def job_environment(job: TrainingJob) -> Iterator[None]:
    """spec.env over this process' own environment, as agents have it; taken back at the end."""
    before = {name: os.environ.get(name) for name in job.spec.env}
    os.environ.update(job.spec.env)
    settings = _fsspec_settings(job.spec.env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if settings is not None:
            settings[0].clear()
            settings[0].update(settings[1])


def _fsspec_settings(env: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """fsspec reads its FSSPEC_* variables once, when it is imported; (the live ones, a copy of
    those before)."""
    if not any(name.startswith("FSSPEC_") for name in env):
        return None
    import fsspec.config

    live: dict[str, Any] = fsspec.config.conf
    before = {scheme: dict(values) for scheme, values in live.items()}
    fsspec.config.set_conf_env(live, {k: v for k, v in env.items() if k.startswith("FSSPEC_")})
    return live, before
