"""What differs between kinds of stores, for everyone who writes to one.

Owns: that. Must not: import a driver; it is given an opened fsspec file system.
"""

from __future__ import annotations

from typing import Any

BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "cos", "obs", "tos")
"""Stores of objects under a bucket or container. They have no directories, and what their drivers
make when asked for one is a bucket: a misspelt name would become a new one, owned and paid for."""


def protocols(system: Any) -> tuple[str, ...]:
    """The URL schemes of an fsspec file system."""
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def is_local(system: Any) -> bool:
    return "file" in protocols(system)


def make_directory(system: Any, path: str) -> None:
    """Make a directory and those above it, where there are directories."""
    if not any(scheme in BUCKETS for scheme in protocols(system)):
        system.makedirs(path, exist_ok=True)
