"""The ConfigMaps of an answer that no annotation of an Event can hold.

The operator writes them, always with the same names, and empties them a while later: it may not
delete ConfigMaps, and the API server deletes these with the job. A part names the question that it
answers, because another answer may take its place.
"""

from __future__ import annotations

import base64

from .. import limits
from ..errors import HoldfastError
from . import names
from .client import KubeClient
from .errors import CONFIG_MAPS, Conflict
from .names import Document, Owner

PART = "part"
"""Key of the bytes."""
KEPT_S = 60.0
"""The command reads the parts as soon as it sees the Event that names them."""


def part_name(job: str, number: int) -> str:
    return f"{job}-answer-{number}"


async def write(cluster: KubeClient, owner: Owner, question: str, data: bytes) -> int:
    """Returns the number of parts. Raises ApiError."""
    size = limits.CODE_PART_BYTES
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    for number, part in enumerate(parts):
        await _put(cluster, _document(owner, number, question, part))
    return len(parts)


async def clear(cluster: KubeClient, owner: Owner, question: str, num_parts: int) -> None:
    """Empty those of this question. Raises ApiError."""
    for number in range(num_parts):
        found = await cluster.find(CONFIG_MAPS, owner.namespace, part_name(owner.name, number))
        if found is not None and _question(found) == question:
            del found["binaryData"]  # with its resource version: a newer part stays
            await cluster.replace(CONFIG_MAPS, owner.namespace, found)


async def read(
    cluster: KubeClient, namespace: str, job: str, question: str, num_parts: int
) -> bytes:
    """Raises ApiError, and HoldfastError when another answer has taken the place of this one."""
    found = b""
    for number in range(num_parts):
        name = part_name(job, number)
        part = await cluster.get(CONFIG_MAPS, namespace, name)
        content = (part.get("binaryData") or {}).get(PART)
        if content is None or _question(part) != question:
            raise HoldfastError(
                f"ConfigMap {namespace}/{name}: holds the answer to another question; ask again"
            )
        found += base64.b64decode(content)
    return found


def _question(document: Document) -> str | None:
    return (document["metadata"].get("annotations") or {}).get(names.REQUEST)


async def _put(cluster: KubeClient, document: Document) -> None:
    namespace = document["metadata"]["namespace"]
    try:
        await cluster.create(CONFIG_MAPS, namespace, document)
    except Conflict as error:
        if not error.exists:
            raise
        await cluster.replace(CONFIG_MAPS, namespace, document)


def _document(owner: Owner, number: int, question: str, data: bytes) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": part_name(owner.name, number),
            "namespace": owner.namespace,
            "labels": {names.LABEL_JOB: owner.name},
            "annotations": {names.REQUEST: question},
            "ownerReferences": [names.owner_reference(owner.name, owner.uid)],
        },
        "binaryData": {PART: base64.b64encode(data).decode()},
    }
