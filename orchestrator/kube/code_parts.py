"""The ConfigMaps that hold a job's uploaded code, in the job's own namespace.

Why ConfigMaps: who creates a job can create them, with no other storage to be reached and no other
credentials, and the API server deletes them with the job. They are immutable, and named by the
archive: an archive is uploaded once. Part 0 is written last, so an archive that has one is whole.
"""

from __future__ import annotations

import base64
from typing import Any

from .. import limits
from . import names
from .names import Document, Owner

PART = "part"
"""Key of the bytes."""
NUM_PARTS = "holdfast.dev/parts"
"""Annotation: how many ConfigMaps the archive has."""
LABEL_CODE = "holdfast.dev/code"
"""Label: the first digits of the archive's name."""
DIGITS = 16
"""Digits of an archive's name in names of ConfigMaps; agents check all 64."""


def part_name(job: str, code: str, number: int) -> str:
    return f"{job}-code-{code[:DIGITS]}-{number}"


def selector(job: str) -> str:
    """The label selector of all archives of a job."""
    return f"{names.LABEL_JOB}={job},{LABEL_CODE}"


def part_documents(owner: Owner, code: str, archive: bytes) -> list[Document]:
    """Documents in the order in which they are to be created."""
    size = limits.CODE_PART_BYTES
    parts = [archive[at : at + size] for at in range(0, len(archive), size)]
    numbered = list(enumerate(parts))
    return [_document(owner, code, n, part, len(parts)) for n, part in reversed(numbered)]


def _document(owner: Owner, code: str, number: int, data: bytes, num_parts: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "immutable": True,
        "metadata": {
            "name": part_name(owner.name, code, number),
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name, LABEL_CODE: code[:DIGITS]},
            "annotations": {NUM_PARTS: str(num_parts)},
            "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
        },
        "binaryData": {PART: base64.b64encode(data).decode()},
    }


def read_part(document: Document) -> tuple[bytes, int]:
    """(bytes, number of parts). Raises ValueError for a ConfigMap that holds no part."""
    annotations = document["metadata"].get("annotations") or {}
    try:
        data = base64.b64decode((document.get("binaryData") or {})[PART], validate=True)
        return data, int(annotations[NUM_PARTS])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no {error}") from None
