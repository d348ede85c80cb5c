"""The training state of a model and its optimizer: named tensors with their boxes in the global
tensors, and the values that are not tensors. Gives an optimizer its state without a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.orchestrator.errors import UserError

from .layout import MODEL, OPTIMIZER, Box, Entry, UnsupportedValue, pack, unpack
from .param_names import ParamNames
from .param_names import plain_name as plain_name
from .placement import refuse_fsdp1

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@runtime_checkable
class Stateful(Protocol):
    """An object with state, such as a learning rate scheduler, as torch defines it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


Extra = MutableMapping[str, Any] | Stateful | None


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the state: this rank's part, and its box in the global tensor."""

    name: str
    local: Tensor
    box: Box


class TrainingState:
    """All state of one rank. Must be made while the parameters are sharded, before any step.

    Raises UserError if the optimizer has parameters that the model does not have, or if two tensors
    of the model have one name.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra) -> None:
        self.optimizer, self.extra = optimizer, extra
        self._has_stepped = bool(optimizer.state)
        if isinstance(optimizer, torch.optim.Optimizer):  # not a look-alike without hooks
            optimizer.register_step_post_hook(lambda *_: self._note_step())
        # FSDP2 replaces a module's parameters while they are gathered; these objects are the
        # sharded ones.
        self._names = ParamNames(model)
        refuse_fsdp1(model)
        self.parameters = self._names.parameters
        """Name -> parameter."""
        names = {id(p): name for name, p in self.parameters.items()}
        self._stepped: dict[str, Tensor] = {}
        """The optimizer's tensor for each parameter: itself, or this rank's part (see `whole`)."""
        self._boxes: dict[str, Box] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                whole = getattr(parameter, "whole", parameter)
                if id(whole) in names:
                    self._stepped[names[id(whole)]] = parameter
                else:
                    raise UserError(
                        f"optimizer: got a parameter of shape {tuple(parameter.shape)} that is not "
                        "in the model; expected parameters of the model given to restore; shard "
                        "or move the model first, then make the optimizer from its parameters"
                    )

    # -- export ---------------------------------------------------------------------------------
    def model_tensors(self) -> Iterator[StateTensor]:
        for name, parameter in self.parameters.items():
            yield StateTensor(MODEL + name, local_of(parameter), self._box(name, parameter))
        for name, (module, key) in self._names.buffers.items():
            buffer = module._buffers[key]
            if buffer is not None:
                yield StateTensor(MODEL + name, local_of(buffer), box_of(buffer))

    def buffers(self) -> frozenset[str]:
        """Names of the tensors that a forward may write, such as batch norm statistics."""
        return frozenset(MODEL + name for name in self._names.buffers)

    def tensors(self) -> Iterator[StateTensor]:
        """All tensors; the order is fixed as long as the set of names is.

        Raises UserError for optimizer state that could not be restored.
        """
        yield from self.model_tensors()
        states = self.optimizer.state
        for name, parameter in self._stepped.items():
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    like = value.shape == parameter.shape
                    if not like:
                        self._expect_known_sharding(name, key, tuple(value.shape))
                    box = self._box(name, self.parameters[name]) if like else box_of(value)
                    yield StateTensor(f"{OPTIMIZER}{name}.{key}", local_of(value), box)

    def addresses(self) -> list[int]:
        """Addresses of all tensors, in the order of `tensors`: a cheap check whether one has
        moved."""
        out = [_address(parameter) for parameter in self.parameters.values()]
        for module, key in self._names.buffers.values():
            buffer = module._buffers[key]
            if buffer is not None:
                out.append(_address(buffer))
        states = self.optimizer.state
        for parameter in self._stepped.values():
            values = states.get(parameter)
            if values:
                out += [_address(v) for v in values.values() if isinstance(v, Tensor)]
        return out

    def _box(self, name: str, parameter: Tensor) -> Box:
        """As box_of, cached: it is slow for a DTensor, and does not change for a parameter."""
        box = self._boxes.get(name)
        if box is None:
            box = self._boxes[name] = box_of(parameter)
        return box

    def entries_to_come(self) -> list[Entry]:
        """Upper estimate of the state that the optimizer will add for the parameters of `_waiting`,
        from its state for the others. Before its first step (a GradScaler may skip the first few)
        it is assumed to be AdamW."""
        waiting = self._waiting()
        kept: dict[str, set[tuple[bool, int, torch.dtype | None]]] = {}
        if not self._has_stepped:
            kept = {"exp_avg": {_AS_PARAMETER}, "exp_avg_sq": {_AS_PARAMETER}, "step": {_NUMBER}}
        for parameter, values in self.optimizer.state.items() if waiting else ():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    like = value.shape == parameter.shape
                    dtype = None if value.dtype == parameter.dtype else value.dtype
                    kinds = kept.setdefault(key, set())
                    kinds.add((like, 0 if like else value.numel(), dtype))
        out = []
        for name, parameter in waiting.items():
            own, num_elements = self._box(name, self.parameters[name]), local_of(parameter).numel()
            for key, kinds in kept.items():
                boxes = [
                    (own if like else _SCALAR if n == 1 else _flat(max(n, num_elements)), dtype)
                    for like, n, dtype in kinds
                ]
                box, dtype = max(
                    boxes, key=lambda b: b[0].num_elements * (b[1] or parameter.dtype).itemsize
                )
                out.append(Entry(f"{OPTIMIZER}{name}.{key}", DTYPES[dtype or parameter.dtype], box))
        return out

    def _note_step(self) -> None:
        self._has_stepped = True

    def _waiting(self) -> dict[str, Tensor]:
        """Parameters without optimizer state, because they have had no gradient yet."""
        states = self.optimizer.state
        return {n: p for n, p in self._stepped.items() if p.requires_grad and not states.get(p)}

    def export_extra(self, *, in_full: bool = False) -> dict[str, Any]:
        """State that is not a tensor, as JSON values. Raises UserError for an unsupported value.

        `in_full` also counts the parameters of `entries_to_come`, to know the final size.
        """
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in self._stepped.items():
            values = self.optimizer.state.get(parameter, {})
            plain = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
            if plain:
                fix = "use an optimizer whose state is tensors and numbers, such as AdamW"
                scalars[name] = _packed(plain, f"optimizer.state[{name!r}]", fix)
        if in_full and scalars:
            longest = max(scalars.values(), key=lambda plain: len(str(plain)))
            scalars |= dict.fromkeys(self._waiting(), longest)
        groups = [
            _packed(
                {k: _plain(v) for k, v in group.items() if k != "params"},
                f"optimizer.param_groups[{index}]",
                "give plain numbers",
            )
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        return {
            "optimizer": {
                "class": type(self.optimizer).__name__, "groups": groups, "scalars": scalars,
            },
            "user": self._user_extra(),
        }  # fmt: skip

    def _user_extra(self) -> Any:
        if self.extra is None:
            return {}
        source = self.extra.state_dict() if isinstance(self.extra, Stateful) else self.extra
        return _packed(source, "extra", "register tensors as buffers of the model")

    # -- import ---------------------------------------------------------------------------------
    def import_extra(self, extra: Mapping[str, Any]) -> None:
        """Restores the result of export_extra."""
        saved = extra.get("optimizer", {})
        groups = saved.get("groups", [])
        if len(groups) == len(self.optimizer.param_groups):
            for group, values in zip(self.optimizer.param_groups, groups, strict=True):
                for key, value in unpack(values).items():
                    old = group.get(key)
                    if isinstance(old, Tensor):
                        old.fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(old, tuple) else value
        scalars = saved.get("scalars", {})
        renamed = self._names.renamed(scalars)
        for stored, values in scalars.items():
            name = renamed.get(stored, stored)
            if name in self._stepped:
                self.optimizer.state[self._stepped[name]].update(unpack(values))
        user = unpack(extra.get("user", {}))
        if isinstance(self.extra, Stateful):
            if user:
                self.extra.load_state_dict(user)
        elif self.extra is not None:
            self.extra.update(user)

    def entries_by_name(self, stored: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """The entries of a file under the names that their tensors have in this model."""
        of_model = (name.removeprefix(MODEL) for name in stored if name.startswith(MODEL))
        renamed = self._names.renamed(of_model)
        if not renamed:
            return stored
        out = {}
        for entry in stored.values():
            if entry.name.startswith(MODEL):
                name = entry.name.removeprefix(MODEL)
                name = MODEL + renamed.get(name, name)
            else:
                name, _, key = entry.name.removeprefix(OPTIMIZER).rpartition(".")
                name = f"{OPTIMIZER}{renamed.get(name, name)}.{key}"
            out[name] = replace(entry, name=name)
        return out

    def optimizer_parameter(self, entry_name: str) -> tuple[str, str] | None:
        """(parameter, key) of an entry `optim.<name>.<key>`; None: not a parameter of the model."""
        name, _, key = entry_name.removeprefix(OPTIMIZER).rpartition(".")
        return (name, key) if name in self._stepped else None

    def make_optimizer_tensor(
        self, name: str, key: str, shape: tuple[int, ...], dtype: str
    ) -> StateTensor:
        """A new tensor of optimizer state, registered with the optimizer, with undefined values.

        A tensor of the parameter's shape is sharded like the parameter, any other is replicated.
        Raises UserError if that may be wrong.
        """
        whole, stepped = self.parameters[name], self._stepped[name]
        kind = TORCH_DTYPES[dtype]
        if shape == tuple(whole.shape) and shape != ():
            tensor = empty_like(stepped, dtype=kind)
            box = self._box(name, whole)
        else:
            self._expect_known_sharding(name, key, shape)
            at = self._scalar_device(stepped) if shape == () else local_of(stepped).device
            tensor = torch.empty(shape, dtype=kind, device=at)
            box = box_of(tensor)
        self.optimizer.state[stepped][key] = tensor
        return StateTensor(f"{OPTIMIZER}{name}.{key}", local_of(tensor), box)

    def _expect_known_sharding(self, name: str, key: str, shape: tuple[int, ...]) -> None:
        """Refuses optimizer state that has neither the shape of its sharded parameter nor that of a
        scalar: on another mesh it is unknown which part of it belongs to which part of the
        parameter. Scalars, and the state of unsharded parameters, are replicated."""
        whole = self.parameters[name]
        if shape != () and isinstance(whole, DTensor):
            raise UserError(
                f"{OPTIMIZER}{name}.{key}: got shape {shape}; expected that of its parameter "
                f"{tuple(whole.shape)}, which is sharded, or a scalar; the "
                f"state of {type(self.optimizer).__name__} cannot be divided among another number "
                "of shards; use an optimizer such as AdamW, or do not shard the model"
            )

    def _scalar_device(self, parameter: Tensor) -> torch.device:
        """The device of Adam's step counter: the CPU, unless the step is fused or captured."""
        for group in self.optimizer.param_groups:
            if any(parameter is p for p in group["params"]):
                if group.get("fused") or group.get("capturable"):
                    return local_of(parameter).device
                break
        return torch.device("cpu")


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, without the dispatch of autograd and DTensor (to_local takes 20 us)."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def empty_like(
    tensor: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """An empty tensor of the same shape and layout. torch.empty_like takes 10 ms for each new shape
    of a DTensor, because it derives the layout of the result."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor.detach(), dtype=dtype, device=device)
    local = torch.empty_like(tensor._local_tensor.detach(), dtype=dtype, device=device)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def box_of(tensor: Tensor) -> Box:
    """The box of this rank's part of a tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(shape, (0,) * len(shape), shape)
    local, offset = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    # An empty part has no position; 0 passes every check.
    empty = 0 in local
    return Box(shape, (0,) * len(shape) if empty else tuple(offset), tuple(local))


def _address(tensor: Tensor) -> int:
    return tensor._local_tensor.data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


_AS_PARAMETER, _NUMBER = (True, 0, None), (False, 1, torch.float32)
_SCALAR = Box((), (), ())


def _flat(num_elements: int) -> Box:
    return Box((num_elements,), (0,), (num_elements,))


def _packed(values: Any, where: str, fix: str) -> Any:
    """The values as JSON values. Raises UserError for an unsupported one, with its key."""
    try:
        return pack(values)
    except (UnsupportedValue, RecursionError):
        for key, value in values.items():
            try:
                pack(value)
            except (UnsupportedValue, RecursionError) as error:
                got = (
                    error if isinstance(error, UnsupportedValue) else "a value that contains itself"
                )
                raise UserError(
                    f"{where}[{key!r}]: got {got}; expected numbers, text, lists and mappings; "
                    f"{fix}"
                ) from None
        raise


def _plain(value: Any) -> Any:
    """A hyperparameter as a number; it may be a tensor (lr of a captured optimizer)."""
    return value.item() if isinstance(value, Tensor) else value
