"""`extra`: values and objects of a script that are the same on all ranks, stored in the header."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from holdfast.orchestrator.errors import UserError

from .layout import unpack
from .optimizer_state import packed


@runtime_checkable
class Stateful(Protocol):
    """An object with state, such as a learning rate scheduler, as torch defines it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Extra = MutableMapping[str, Any] | Stateful | None
"""One object, or a dict of values and of objects by name."""

_USER, _OBJECTS = "user", "objects"


def export_user(extra: Extra) -> dict[str, Any]:
    """JSON values for a header. Raises UserError for an unsupported value, with its name."""
    fix = "register tensors as buffers of the model"
    if extra is None:
        return {_USER: {}}
    if isinstance(extra, Stateful):
        return {_USER: packed(extra.state_dict(), "extra", fix)}
    names = _objects(extra)
    values = {name: extra[name].state_dict() if name in names else extra[name] for name in extra}
    stored = {_USER: packed(values, "extra", fix)}
    return {**stored, _OBJECTS: sorted(names)} if names else stored


def import_user(extra: Extra, header: Mapping[str, Any]) -> None:
    """Fills `extra` from what was exported, and prints what has no counterpart. Raises UserError if
    one object was stored and several are given, or the other way round."""
    if extra is None:
        return
    user: dict[str, Any] = unpack(header.get(_USER, {}))
    stored = header.get(_OBJECTS, [])
    if isinstance(extra, Stateful):
        if stored:
            raise UserError(
                f"session.restore: got one object as `extra`; expected {_listed(stored)} by name, "
                f"as in the checkpoint: extra={{{stored[0]!r}: {stored[0]}, ...}}"
            )
        if user:
            extra.load_state_dict(user)
        return
    given = _objects(extra)
    if given and not stored and not user.keys() <= extra.keys():
        raise UserError(
            f"session.restore: got {_listed(given)} by name in `extra`; expected one object, as "
            "the checkpoint has the state of one, without a name; give the same one to continue it"
        )
    for name in given:
        if name in stored:
            extra[name].load_state_dict(user[name])
        else:
            _say(f"the checkpoint has no state of {name!r}; it stays as the script made it")
    for name in stored:
        if name not in given:
            _say(f"the checkpoint has state of {name!r}, which the script does not give")
    extra.update({n: v for n, v in user.items() if n not in stored and n not in given})


def _objects(extra: Mapping[str, Any]) -> list[str]:
    """Names of what has state, of what is not a value."""
    return [name for name, value in extra.items() if isinstance(value, Stateful)]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def _say(what: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"holdfast: extra: {what}", file=sys.stderr)
