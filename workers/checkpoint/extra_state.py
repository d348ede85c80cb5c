"""`extra`: values and objects of a script that are the same on all ranks, stored in the header."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from holdfast.orchestrator.errors import UserError

from . import rank_values
from .layout import UnsupportedValue, unpack
from .optimizer_state import changes, packed


@runtime_checkable
class Stateful(Protocol):
    """An object with state, such as a learning rate scheduler, as torch defines it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Extra = MutableMapping[str, Any] | Stateful | None
"""One object, or a dict of values and of objects by name."""

_USER, _OBJECTS, _IN_SCRIPT, _SCHEDULES = "user", "objects", "in_script", "schedules"
_POSITION = ("last_epoch", "_step_count", "_last_lr")
"""Attributes of a schedule that are not settings."""
_FIX = (
    "give a module with tensors, such as an averaged model, with the model: "
    's.restore(nn.ModuleDict({"model": model, "ema": ema}), optimizer); register other tensors as '
    "buffers of the model"
)


def export_user(extra: Extra, in_script: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values for a header. Raises UserError for an unsupported value, with its name."""
    settings: dict[str, Any] = {_IN_SCRIPT: in_script} if in_script else {}
    if schedules := schedules_in(extra):
        settings[_SCHEDULES] = {name: type(s).__name__ for name, s in schedules.items()}
    if extra is None:
        return {_USER: {}}
    if isinstance(extra, Stateful):
        return {_USER: _packed(extra.state_dict()), **settings}
    names = _objects(extra)
    values = {name: extra[name].state_dict() if name in names else extra[name] for name in extra}
    stored = {_USER: _packed(values), **settings}
    return {**stored, _OBJECTS: sorted(names)} if names else stored


def settings_of(extra: Extra) -> dict[str, Any]:
    """The settings of the schedules in `extra`, as JSON values; one without a name is ""."""
    settings = {}
    for name, schedule in schedules_in(extra).items():
        with contextlib.suppress(UserError):  # raised where it matters, when it is staged
            state = _packed(schedule.state_dict())
            settings[name] = {k: v for k, v in state.items() if k not in _POSITION}
    return settings


def schedules_in(extra: Extra) -> dict[str, LRScheduler]:
    named = {"": extra} if isinstance(extra, Stateful) else extra or {}
    return {name: s for name, s in named.items() if isinstance(s, LRScheduler)}


def changed_settings(in_script: Mapping[str, Any], header: Mapping[str, Any]) -> Iterator[str]:
    """Settings in which the script differs from the writer of a header with this extra state."""
    for name, now in in_script.items():
        before = header.get(_IN_SCRIPT, {}).get(name, {})
        stored = header.get(_USER, {})
        yield from changes(
            f"extra[{name!r}]" if name else "extra", before, now, stored[name] if name else stored
        )


def import_user(extra: Extra, header: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Fills `extra` from what was exported, and says what has no counterpart. Raises UserError if
    one object was stored and several are given, or the other way round."""
    user: dict[str, Any] = unpack(header.get(_USER, {}), rank_values.from_json)
    stored = header.get(_OBJECTS, [])
    if extra is None:
        if user:
            say(f"extra: the checkpoint has {_listed(user)}, and the script gives no extra: it is "
                "not restored, and later checkpoints are without it")  # fmt: skip
        return
    if isinstance(extra, Stateful):
        if stored:
            raise UserError(
                f"session.restore: got one object as `extra`; expected {_listed(stored)} by name, "
                f"as in the checkpoint: extra={{{stored[0]!r}: {stored[0]}, ...}}"
            )
        if user:
            _load("", extra, user, header, say)
        else:
            say(f"extra: the checkpoint has none; the {type(extra).__name__} stays as the script "
                "made it")  # fmt: skip
        return
    objects = _objects(extra)
    if objects and not stored and not user.keys() <= extra.keys():
        raise UserError(
            f"session.restore: got {_listed(objects)} by name in `extra`; expected one object, as "
            "the checkpoint has the state of one, without a name; give the same one to continue it"
        )
    for name in objects:
        if name in stored:
            _load(name, extra[name], user[name], header, say)
    for name in extra:
        if name not in (stored if name in objects else user):
            say(f"extra: the checkpoint has no state of {name!r}; it stays as the script made it")
    for name in stored:
        if name not in objects:
            say(f"extra: the checkpoint has state of {name!r}, which the script does not give")
    for name in user:
        if name not in stored and name not in objects:
            extra[name] = _filled(extra.get(name), user[name])


def _filled(held: Any, value: Any) -> Any:
    """The value, in the containers of `held`: a kept process may go on with them."""
    if not isinstance(held, type(value)):
        return value
    if isinstance(held, dict):
        filled = {key: _filled(held.get(key), part) for key, part in value.items()}
        held.clear()
        held.update(filled)
    elif isinstance(held, list):
        held[:] = [_filled(*pair) for pair in zip_longest(held[: len(value)], value)]
    else:
        return value
    return held


def _load(
    name: str,
    held: Stateful,
    state: dict[str, Any],
    header: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Load one object, and name a schedule that gets the state of another kind."""
    if isinstance(held, LRScheduler):
        mine, kind = held.state_dict().keys(), type(held).__name__
        before = header.get(_SCHEDULES, {}).get(name, kind)
        if before != kind or _settings(mine) != _settings(state):
            what = f"a {before}" if before != kind else "another schedule"
            lacks = _listed(sorted(_settings(mine) - _settings(state)))
            stays = f"; {lacks} stay as the script made them" if lacks else ""
            say(
                f"{f'extra[{name!r}]' if name else 'extra'}: the checkpoint has the state of "
                f"{what}, and the script gives a {kind}: it continues at the step of the "
                f"checkpoint, and the learning rate may jump{stays}"
            )
    held.load_state_dict(state)


def _settings(keys: Iterable[str]) -> set[str]:
    """Names that torch keeps from one version to the next."""
    return {key for key in keys if not key.startswith("_")}


def _packed(values: Mapping[str, Any]) -> Any:
    return packed(values, "extra", _FIX, _one_number)


def _one_number(value: Any) -> Any:
    """A tensor of one number, such as a learning rate, as JSON values."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UnsupportedValue(type(value).__name__)
    return rank_values.to_json(value)


def _objects(extra: Mapping[str, Any]) -> list[str]:
    """Names of what has state, of what is not a value."""
    return [name for name, value in extra.items() if isinstance(value, Stateful)]


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
