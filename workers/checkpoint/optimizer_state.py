"""The state of one optimizer: its tensors with their boxes, its numbers, and its groups. Gives an
optimizer its state without a step, and refuses what it could not give back.

A state tensor has one of these forms. The form is stored unless it is the first:
`""`: like its parameter, or a scalar, or any tensor of a parameter that is not sharded;
`"local"`: a plain tensor like this rank's part of a parameter that is a DTensor;
`"parameter"`: a DTensor of another shape, placed like the parameter (row statistics);
`{"axes": {axis of the mesh: dimension}}`: a DTensor that is sharded along these axes only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from holdfast.orchestrator.errors import UserError, few

from . import rank_values
from .given_optimizers import SEPARATOR
from .layout import OPTIMIZER, Box, Entry, UnsupportedValue, pack, unpack, unsupported
from .tensors import (
    TORCH_DTYPES,
    StateTensor,
    address_of,
    box_of,
    empty_like,
    empty_on_mesh,
    local_of,
    refuse_subclass,
    storage_type,
)

Form = str | dict[str, dict[str, int]]
BoxOf = Callable[[str, Tensor], Box]
"""The box of a parameter, by name."""

_AS_PARAMETER, _NUMBER = (True, 0, None), (False, 1, torch.float32)
_SCALAR = Box((), (), (), 1)
_NAMES_OF_PARAMETERS = ("params", "param_names")


class WrongOptimizer(UserError):
    """The checkpoint was written with another optimizer."""


class OptimizerState:
    """One optimizer, with the names that its parameters have in the model."""

    def __init__(
        self, name: str, optimizer: Any, parameters: Mapping[str, nn.Parameter], box: BoxOf
    ) -> None:
        self.name, self.optimizer, self._box = name, optimizer, box
        self.prefix = f"{OPTIMIZER}{name}{SEPARATOR}" if name else OPTIMIZER
        self._label = f"optimizer {name}" if name else "optimizer"
        self._parameters = parameters
        self.stepped: dict[str, Tensor] = {}
        """The optimizer's tensor for each parameter: itself, or this rank's part (see `whole`)."""
        self._groups: list[list[str]] = []
        self._in_script = [_numbers(group) for group in optimizer.param_groups]
        """Settings of each group as the script made it."""
        self._has_stepped = bool(optimizer.state)
        self._find_parameters({id(p): name for name, p in parameters.items()})
        self.total_sizes = self.sizes
        """Sizes over all stages of a pipeline."""
        self._without_gradient = {n: p for n, p in self.stepped.items() if p.requires_grad}
        self._with_gradient: set[str] = set()
        self._num_checked = 0
        self._forms: dict[str, Form] = {}
        self._num_formed = 0
        self._stored_forms: Mapping[str, Form] = {}
        if isinstance(optimizer, Optimizer):  # not a look-alike without hooks
            optimizer.register_step_post_hook(lambda *_: self._note_step())

    def _find_parameters(self, names: Mapping[int, str]) -> None:
        for group in self.optimizer.param_groups:
            members = []
            for parameter in group["params"]:
                name = names.get(id(getattr(parameter, "whole", parameter)))
                if name is None:
                    raise UserError(
                        f"{self._label}: got a parameter of shape {tuple(parameter.shape)} that is "
                        "not in the model; expected parameters of the model given to restore; "
                        "shard or move the model first, then make the optimizer from its parameters"
                    )
                self.stepped[name] = parameter
                members.append(name)
            self._groups.append(members)

    @property
    def sizes(self) -> list[int]:
        """Number of parameters in each group."""
        return [len(members) for members in self._groups]

    def of(self, name: str) -> Mapping[str, Any]:
        """The state of a parameter; empty before its first step."""
        state: Mapping[str, Any] = self.optimizer.state.get(self.stepped[name]) or {}
        return state

    def tensors(self) -> Iterator[StateTensor]:
        """Raises UserError for state that could not be restored."""
        self._expect_state_of_parameters()
        for name in self.stepped:
            for key, value in self.of(name).items():
                if isinstance(value, Tensor):
                    form = self._form(name, key, value)
                    like = form == "local" or (form == "" and self._is_like(name, value))
                    box = self._box(name, self._parameters[name]) if like else box_of(value)
                    yield StateTensor(f"{self.prefix}{name}.{key}", local_of(value), box, value)

    def addresses(self) -> list[int]:
        states, out = self.optimizer.state, []
        for parameter in self.stepped.values():
            values = states.get(parameter)
            if values:
                out += [address_of(v) for v in values.values() if isinstance(v, Tensor)]
        return out

    # -- what a tensor of state is --------------------------------------------------------------
    def _is_like(self, name: str, value: Tensor) -> bool:
        return value.shape == self.stepped[name].shape

    def _form(self, name: str, key: str, value: Tensor) -> Form:
        """Raises UserError for a tensor of which it is unknown how to divide it on another mesh."""
        where = f"{self.prefix}{name}.{key}"
        refuse_subclass(where, value)
        whole, stepped = self._parameters[name], self.stepped[name]
        if isinstance(value, DTensor):
            declared = self._placements(key, whole) is not None
            return self._form_on_mesh(where, value, whole if declared else stepped)
        if isinstance(stepped, DTensor) and value.shape == local_of(whole).shape:
            return "local"
        if value.numel() == 1:
            return ""
        plain_of_whole = isinstance(stepped, DTensor)
        if isinstance(whole, DTensor) and (plain_of_whole or not self._is_like(name, value)):
            raise self._unknown_sharding(where, tuple(value.shape), whole)
        return ""

    def _form_on_mesh(self, where: str, value: DTensor, stepped: Tensor) -> Form:
        same_mesh = isinstance(stepped, DTensor) and value.device_mesh == stepped.device_mesh
        if same_mesh and isinstance(stepped, DTensor) and value.placements == stepped.placements:
            return "" if value.shape == stepped.shape else "parameter"
        kinds = {type(placement) for placement in value.placements}
        if not same_mesh or not kinds <= {Shard, Replicate}:
            raise UserError(
                f"{where}: got a tensor placed as {value.placements} on {value.device_mesh}; "
                "expected shards or replicas on the mesh of its parameter; use an optimizer that "
                "makes its state from the parameter or its gradient"
            )
        axes = {
            _axis_name(value, dim): placement.dim
            for dim, placement in enumerate(value.placements)
            if isinstance(placement, Shard)
        }
        return {"axes": axes}

    def _unknown_sharding(self, where: str, shape: tuple[int, ...], whole: Tensor) -> UserError:
        return UserError(
            f"{where}: got shape {shape}; expected its parameter's {tuple(whole.shape)}, "
            f"which is sharded, or a scalar, or a DTensor; the state of "
            f"{type(self.optimizer).__name__} cannot be divided among another number of shards; "
            "make the optimizer from model.parameters(), use one such as AdamW, or do not shard "
            "the model"
        )

    def _current_forms(self, num: int) -> dict[str, Form]:
        """Forms other than "", by key of the state, or by parameter and key where they differ.
        `num` is the number of values in the state."""
        if num == self._num_formed:
            return self._forms
        by_key: dict[str, dict[str, Form]] = {}
        for name in self.stepped:
            for key, value in self.of(name).items():
                if isinstance(value, Tensor):
                    by_key.setdefault(key, {})[name] = self._form(name, key, value)
        self._forms, self._num_formed = {}, num
        for key, forms in by_key.items():
            first = next(iter(forms.values()))
            if all(form == first for form in forms.values()):
                self._forms |= {key: first} if first else {}
            else:
                self._forms |= {f"{name}.{key}": form for name, form in forms.items() if form}
        return self._forms

    # -- complete or refused --------------------------------------------------------------------
    def _note_step(self) -> None:
        """Remembers who has had a gradient: zero_grad may come before the step is staged."""
        self._has_stepped = True
        if self._without_gradient:
            names = [n for n, p in self._without_gradient.items() if p.grad is not None]
            self._with_gradient.update(names)
            for name in names:
                del self._without_gradient[name]

    def expect_complete(self) -> None:
        """Raises UserError if some parameters of a group that have been stepped have state here and
        others have not, or if parameters were added: their state would be lost."""
        num = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if num != len(self.stepped):
            raise UserError(
                f"{self._label}: got {num} parameters; expected {len(self.stepped)} as at restore; "
                "add all parameters and groups before s.restore"
            )
        if len(self._with_gradient) == self._num_checked:
            return
        self._num_checked = len(self._with_gradient)
        for index, members in enumerate(self._groups):
            stepped = [n for n in members if n in self._with_gradient]
            without = [n for n in stepped if not self.of(n) and local_of(self.stepped[n]).numel()]
            if without and len(without) < len(stepped):
                raise UserError(
                    f"{self._label}: got no state of {few(without)} after a step, but state of "
                    f"others in param_groups[{index}]; expected state of all on every rank, or of "
                    "none; use an optimizer that keeps on each rank the state of all parameters "
                    "of its part of the model"
                )

    def _expect_state_of_parameters(self) -> None:
        mine = {id(parameter) for parameter in self.stepped.values()}
        for key, value in self.optimizer.state.items():
            if value and id(key) not in mine:
                got = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else key
                raise UserError(
                    f"{self._label}: got state[{got!r}], which is not of one of its parameters; "
                    "expected state of parameters only; keep it in a param group as a number, or "
                    "as a buffer of the model"
                )

    def _waiting(self) -> dict[str, Tensor]:
        """Parameters without optimizer state, because they have had no gradient yet."""
        return {n: p for n, p in self.stepped.items() if p.requires_grad and not self.of(n)}

    def entries_to_come(self) -> list[Entry]:
        """Upper estimate of the state that will be added for the parameters of `_waiting`, from the
        state of the others. Before the first step (a GradScaler may skip the first few) the
        optimizer is assumed to be AdamW."""
        waiting = self._waiting()
        kept: dict[str, set[tuple[bool, int, torch.dtype | None]]] = {}
        if not self._has_stepped:
            kept = {"exp_avg": {_AS_PARAMETER}, "exp_avg_sq": {_AS_PARAMETER}, "step": {_NUMBER}}
        for name in self.stepped if waiting else ():
            for key, value in self.of(name).items():
                if isinstance(value, Tensor):
                    like = self._is_like(name, value)
                    same = value.dtype == self.stepped[name].dtype
                    kinds = kept.setdefault(key, set())
                    kinds.add((like, 0 if like else value.numel(), None if same else value.dtype))
        out = []
        for name, parameter in waiting.items():
            own, num_elements = self._box(name, self._parameters[name]), local_of(parameter).numel()
            for key, kinds in kept.items():
                boxes = [
                    (own if like else _SCALAR if n == 1 else _flat(max(n, num_elements)), dtype)
                    for like, n, dtype in kinds
                ]
                box, dtype = max(
                    boxes, key=lambda b: b[0].num_elements * (b[1] or parameter.dtype).itemsize
                )
                entry = f"{self.prefix}{name}.{key}"
                kind = storage_type(entry, dtype or parameter.dtype)
                out.append(Entry(entry, kind, box))
        return out

    # -- numbers and groups ---------------------------------------------------------------------
    def export(self, *, in_full: bool = False) -> dict[str, Any]:
        """The state that is not a tensor, as JSON values. Raises UserError for an unsupported one.

        `in_full` also counts the parameters of `entries_to_come`, to know the final size.
        """
        self.expect_complete()
        scalars: dict[str, dict[str, Any]] = {}
        without, num_values = [], 0
        states = self.optimizer.state
        for name, parameter in self.stepped.items():
            values = states.get(parameter)
            if not values:
                without.append(name)
                continue
            num_values += len(values)
            plain = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
            if plain:
                fix = "use an optimizer whose state is tensors and numbers, such as AdamW"
                where = f"{self._label}.state[{name!r}]"
                scalars[name] = packed(plain, where, fix)
        if in_full and scalars:
            longest = max(scalars.values(), key=lambda plain: len(str(plain)))
            scalars |= dict.fromkeys(self._waiting(), longest)
        groups = enumerate(self.optimizer.param_groups[: len(self._groups)])
        out = {
            "class": type(self.optimizer).__name__,
            "groups": [self._export_group(number, _numbers(group)) for number, group in groups],
            "in_script": self._settings,
            "sizes": self.total_sizes,
            "scalars": scalars,
            "without": "all" if len(without) == len(self.stepped) else without,
        }
        forms = self._current_forms(num_values)
        return out | ({"forms": forms} if forms else {})

    def _export_group(self, index: int, group: Mapping[str, Any]) -> Any:
        where = f"{self._label}.param_groups[{index}]"
        for key, value in group.items():
            if isinstance(value, Tensor):
                raise UserError(
                    f"{where}[{key!r}]: got a tensor of shape {tuple(value.shape)}; expected a "
                    "number; keep tensors in the state of a parameter"
                )
        return packed(group, where, "give plain numbers")

    @cached_property
    def _settings(self) -> list[Any]:
        return [self._export_group(index, group) for index, group in enumerate(self._in_script)]

    def changed_settings(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Settings in which the script differs from the one whose `export` gave `saved`."""
        groups = zip(saved.get("in_script", ()), saved.get("groups", ()), strict=False)
        for index, (before, stored) in enumerate(groups):
            where = f"{self._label}.param_groups[{index}]"
            yield from changes(where, before, self._settings[index], stored)

    def expect_stored(self, saved: Mapping[str, Any]) -> None:
        """Raises WrongOptimizer if `saved`, a result of `export`, is of another optimizer; gets the
        forms of the tensors."""
        here = type(self.optimizer).__name__
        if saved.get("class", here) != here:
            raise WrongOptimizer(
                f"{self._label}: the checkpoint was written with {saved['class']}; got {here}; "
                "use the optimizer of the run that wrote it, or another checkpoint path"
            )
        num, sizes = len(saved.get("groups", self._groups)), saved.get("sizes")
        own = self.total_sizes
        if num != len(own) or sizes not in (None, own):
            wrote = f"{num} param groups" if sizes is None else f"param groups of {sizes}"
            raise WrongOptimizer(
                f"{self._label}: the checkpoint was written with {wrote} parameters; got {own}; "
                "expected the same groups, as each has a learning rate of its own; make them as in "
                "the run that wrote it, or use another checkpoint path"
            )
        self._stored_forms = saved.get("forms", {})

    def missing(self, saved: Mapping[str, Any], found: set[str]) -> list[str]:
        """Parameters whose state is not among the entries `found`, though they had been stepped."""
        without = saved.get("without", "all")
        if without == "all":
            return []
        names = {*without, *saved.get("scalars", {}), *(self.owner(entry) for entry in found)}
        return [n for n, p in self.stepped.items() if p.requires_grad and n not in names]

    def restore_numbers(self, saved: Mapping[str, Any], elsewhere: Collection[str]) -> None:
        """Sets the result of `export`, without what it has of the parameters `elsewhere`; the
        tensors are there."""
        for group, values in zip(
            self.optimizer.param_groups, saved.get("groups", ()), strict=False
        ):
            for key, value in unpack(values).items():
                old = group.get(key)
                if isinstance(old, Tensor):
                    old.fill_(value)
                elif key not in _NAMES_OF_PARAMETERS:
                    group[key] = tuple(value) if isinstance(old, tuple) else value
        for name, values in saved.get("scalars", {}).items():
            if name in elsewhere:
                continue
            if name not in self.stepped:
                raise WrongOptimizer(f"{self._label}: got state of {name}, which it does not have")
            self.optimizer.state.setdefault(self.stepped[name], {}).update(unpack(values))

    # -- tensors of a file ----------------------------------------------------------------------
    def owner(self, entry: str) -> str:
        """The name of the parameter of an entry."""
        return self._parts(entry)[0]

    def _parts(self, entry: str) -> tuple[str, str]:
        name, _, key = entry.removeprefix(self.prefix).rpartition(".")
        return name, key

    def make(self, entry: str, shape: tuple[int, ...], dtype: str) -> StateTensor | None:
        """A new tensor of state for an entry of a file, registered with the optimizer, with
        undefined values. None: this optimizer has no such parameter.

        Raises UserError if it is unknown how to divide it on this mesh.
        """
        name, key = self._parts(entry)
        if name not in self.stepped:
            return None
        whole, stepped = self._parameters[name], self.stepped[name]
        forms, kind = self._stored_forms, TORCH_DTYPES[dtype]
        form = forms.get(f"{name}.{key}", forms.get(key, ""))
        box = None
        tensor: Tensor
        declared = self._placements(key, whole)
        if declared is not None and isinstance(whole, DTensor):
            at = local_of(whole).device
            tensor = empty_on_mesh(shape, kind, at, whole.device_mesh, declared)
        elif form == "local" or (form == "" and shape == tuple(whole.shape) and shape != ()):
            tensor = empty_like(local_of(whole) if form == "local" else stepped, dtype=kind)
            box = self._box(name, whole)
        elif form == "":
            if isinstance(whole, DTensor) and shape and shape.count(1) != len(shape):
                raise self._unknown_sharding(entry, shape, whole)
            at = self._scalar_device(stepped) if shape == () else local_of(stepped).device
            tensor = torch.empty(shape, dtype=kind, device=at)
        elif isinstance(whole, DTensor):
            if not isinstance(stepped, DTensor):
                raise self._unknown_sharding(entry, shape, whole)
            mesh, device = whole.device_mesh, local_of(whole).device
            placements = whole.placements
            if isinstance(form, dict):
                axes = form["axes"]
                named = [axes.get(_axis_name(whole, dim)) for dim in range(mesh.ndim)]
                placements = tuple(Replicate() if dim is None else Shard(dim) for dim in named)
            tensor = empty_on_mesh(shape, kind, device, mesh, placements)
        else:
            tensor = torch.empty(shape, dtype=kind, device=whole.device)
        self.optimizer.state.setdefault(stepped, {})[key] = tensor
        return StateTensor(entry, local_of(tensor), box_of(tensor) if box is None else box)

    def _placements(self, key: str, whole: Tensor) -> Sequence[Any] | None:
        """Placements of an optimizer's state of its own shape on the mesh of the parameter, which
        its method `state_placements(key, parameter)` may say. With it, such state can be divided on
        any mesh, one process included."""
        say = getattr(self.optimizer, "state_placements", None)
        return say(key, whole) if say is not None and isinstance(whole, DTensor) else None

    def _scalar_device(self, parameter: Tensor) -> torch.device:
        """The device of Adam's step counter: the CPU, unless the step is fused or captured."""
        for group in self.optimizer.param_groups:
            if any(parameter is p for p in group["params"]):
                if group.get("fused") or group.get("capturable"):
                    return local_of(parameter).device
                break
        return torch.device("cpu")


def _axis_name(tensor: DTensor, dim: int) -> str:
    names = tensor.device_mesh.mesh_dim_names
    return names[dim] if names else str(dim)


def _flat(num_elements: int) -> Box:
    return Box((num_elements,), (0,), (num_elements,), 1)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; a tensor of one number is that number."""
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in _NAMES_OF_PARAMETERS
    }


def changes(
    where: str, before: Mapping[str, Any], now: Mapping[str, Any], stored: Mapping[str, Any]
) -> Iterator[str]:
    """The settings that have another value in the script `now` than `before`, with both values that
    it could have. All are packed."""
    for key, value in now.items():
        is_setting = key in before and key != "initial_lr"  # a schedule's copy of lr
        if is_setting and before[key] != value and stored.get(key) != value:
            mine, kept = (unpack(item, rank_values.from_json) for item in (value, stored.get(key)))
            yield f"{where}[{key!r}] ({mine} in the script, {kept} in the checkpoint)"


def packed(values: Any, where: str, fix: str, blob: Callable[[Any], Any] = unsupported) -> Any:
    """The values as JSON values. Raises UserError for an unsupported one, with its key."""
    try:
        return pack(values, blob)
    except UnsupportedValue:
        for key, value in values.items():
            try:
                pack(value, blob)
            except UnsupportedValue as error:
                raise UserError(
                    f"{where}[{key!r}]: got {error}; expected numbers, text, lists and mappings; "
                    f"{fix}"
                ) from None
        raise
