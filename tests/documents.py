"""Jobs as a spec file has them."""

from __future__ import annotations

from typing import Any


def job_document(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    api_version = "holdfast.dev/v1alpha1"
    metadata = {"name": name}
    return {"apiVersion": api_version, "kind": "TrainingJob", "metadata": metadata, "spec": spec}
