"""Results of modules' `get_extra_state`, such as the scales of float8 layers: kept in the header of
each shard, under the name that torch's state_dict gives them. No pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from holdfast.orchestrator.errors import UserError

from . import rank_values
from .layout import MODULES, UnsupportedValue

NAME = "_extra_state"
Modules = Mapping[str, nn.Module]
"""Name of the state -> module."""


def has_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def export(modules: Modules) -> dict[str, Any]:
    """JSON values for a header. Raises UserError for a value that cannot be stored, and for a
    module that could not take it back."""
    return {MODULES: {name: _stored(name, s) for name, s in modules.items()}} if modules else {}


def _stored(name: str, module: nn.Module) -> Any:
    kind = type(module)
    if kind.set_extra_state is nn.Module.set_extra_state:
        raise UserError(f"{name}: got {kind.__name__} with get_extra_state and without "
                        "set_extra_state; expected both; define the other")  # fmt: skip
    try:
        return rank_values.to_json(module.get_extra_state())
    except UnsupportedValue as error:
        raise UserError(
            f"{name}: got {error} from get_extra_state of {kind.__name__}; expected numbers, text, "
            "lists, mappings, bytes, plain tensors and arrays; return these, or keep it in buffers"
        ) from None


def load(
    modules: Modules, header: Mapping[str, Any], elsewhere: set[str], say: Callable[[str], None]
) -> None:
    """Gives each module what was exported, and says what has no counterpart. Modules `elsewhere`
    are those of other stages."""
    stored = header.get(MODULES, {})
    for name, module in modules.items():
        if name in stored:
            module.set_extra_state(rank_values.from_json(stored[name]))
        else:
            say(f"the checkpoint has no {name}; it stays as the script made it")
    for name in stored:
        if name not in modules and name not in elsewhere:
            say(f"the checkpoint has {name}, and the model has no such module: it is lost")
