"""State of a trainer as text of one size, in each step and on each rank: staged state must not
grow, and the ranks of a node write parts of one file."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch import Tensor

from holdfast.orchestrator.errors import UserError

TEXT_BYTES = 32 * 1024
ROOM_BYTES = TEXT_BYTES // 4 * 3
"""Bytes of the JSON in it."""


def to_json(state: Any) -> str:
    """JSON of numbers, texts, lists and dicts; a tensor of one number stays a tensor. Raises
    UserError for anything else."""

    def other(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
            return value.item()
        raise UserError(
            f"holdfast.integrations: got {type(value).__name__} in the state of the trainer or of "
            "a callback; expected numbers, text, lists, dicts and tensors of one number"
        )

    return json.dumps(state, default=other)


def pack(text: str) -> str:
    """Raises UserError for a text that is too long."""
    if len(text) > ROOM_BYTES:
        raise UserError(
            f"holdfast.integrations: got {len(text)} bytes of state of the trainer and its "
            f"callbacks; expected at most {ROOM_BYTES}; keep large state of a callback elsewhere"
        )
    return base64.b64encode(text.ljust(ROOM_BYTES).encode()).decode()


def unpack(packed: str) -> Any:
    def tensor(found: dict[str, Any]) -> Any:
        if found.keys() != {"tensor", "dtype"}:
            return found
        return torch.tensor(found["tensor"], dtype=getattr(torch, found["dtype"]))

    return json.loads(base64.b64decode(packed), object_hook=tensor)
