"""Releases with other messages have another protocol, so a controller rejects their agents."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages

DIGESTS = {1: "7a4db69fbecdab53"}
"""Protocol version -> digest of its messages. That of a released version never changes here."""


def without_descriptions(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: without_descriptions(v) for k, v in node.items() if k != "description"}
    return [without_descriptions(part) for part in node] if isinstance(node, list) else node


def test_messages_that_change_have_another_protocol_version() -> None:
    schema = without_descriptions(msgspec.json.schema(messages.AnyMessage))
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]
    assert DIGESTS[limits.PROTOCOL_VERSION] == digest, "raise PROTOCOL_VERSION after a release"
