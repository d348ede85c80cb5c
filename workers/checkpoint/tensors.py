"""One rank's part of a tensor: its memory, its box in the global tensor, and its storage type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from holdfast.orchestrator.errors import UserError

from .layout import Box

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

_PLAIN = (Tensor, nn.Parameter)
_OWN_MEMORY: Any = Tensor.__torch_dispatch__
"""The method of every class whose tensors keep their values in their own memory."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the state: this rank's part, and its box in the global tensor."""

    name: str
    local: Tensor
    box: Box
    whole: Tensor | None = None
    """The tensor that `local` is the memory of, if it is another one."""

    @property
    def owner(self) -> Tensor:
        """The tensor that is written by who writes this one."""
        return self.local if self.whole is None else self.whole


def storage_type(name: str, dtype: torch.dtype) -> str:
    """The name of a format in files. Raises UserError for one that they cannot hold."""
    if dtype not in DTYPES:
        names = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
        raise UserError(
            f"{name}: got a tensor of {dtype}; expected one of {names}; keep it in one of these, "
            "such as torch.view_as_real of complex numbers, or register a buffer that a checkpoint "
            "need not have with persistent=False"
        )
    return DTYPES[dtype]


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, without the dispatch of autograd and DTensor (to_local takes 20 us)."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def memory_of(name: str, tensor: Tensor) -> Tensor:
    """This rank's part as the plain tensor that holds its values.

    A subclass that wraps one tensor of its own shape and type (float8 training wraps its weights
    so) is unwrapped. Raises UserError for any other: its values are in no single tensor.
    """
    local = local_of(tensor)
    while not _keeps_its_values(local):
        inner = _only_inner(local)
        if inner is None:
            raise UserError(
                f"{name}: got a {type(local).__name__}, a subclass of torch.Tensor that keeps its "
                "values in other tensors; expected a plain tensor; with frozen ones write "
                's.restore(..., keep="trainable"), and load them in the script at each start'
            )
        local = inner.detach()
    return local


def _keeps_its_values(tensor: Tensor) -> bool:
    kind: Any = type(tensor)
    return kind in _PLAIN or kind.__torch_dispatch__ is _OWN_MEMORY


def _only_inner(wrapper: Any) -> Tensor | None:
    has_inner = hasattr(wrapper, "__tensor_flatten__")
    names: list[str] = wrapper.__tensor_flatten__()[0] if has_inner else []
    inner = getattr(wrapper, names[0]) if len(names) == 1 else None
    like = inner is not None and (inner.shape, inner.dtype) == (wrapper.shape, wrapper.dtype)
    return inner if like else None


def refuse_subclass(name: str, value: Tensor) -> None:
    """Raises UserError for state of an optimizer that would come back as a plain tensor."""
    kind = type(value._local_tensor if isinstance(value, DTensor) else value)
    if kind not in _PLAIN:
        raise UserError(
            f"{name}: got a {kind.__name__}, a subclass of torch.Tensor; expected a plain tensor "
            "or a DTensor, as a checkpoint would give the optimizer a plain tensor back; use an "
            "optimizer whose state is plain tensors"
        )


def address_of(tensor: Tensor) -> int:
    return tensor._local_tensor.data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


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


def empty_on_mesh(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    placements: Sequence[Any],
) -> DTensor:
    """An empty DTensor of its own shape."""
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return DTensor.from_local(
        torch.empty(local_shape, dtype=dtype, device=device),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def split_dims(tensor: DTensor) -> list[int]:
    """Dimensions of its mesh along which the parts differ. Not is_shard(): in some versions it is
    False for _StridedShard (FSDP2 over a tensor axis)."""
    return [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def num_parts(tensor: Tensor) -> int:
    """Number of different parts of a tensor over all ranks; 1: every rank has the whole."""
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(tensor.device_mesh.size(dim) for dim in split_dims(tensor))


def box_of(tensor: Tensor) -> Box:
    """The box of this rank's part of a tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(shape, (0,) * len(shape), shape, 1)
    local, offset = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    # An empty part has no position; 0 passes every check.
    empty = 0 in local
    at = (0,) * len(shape) if empty else tuple(offset)
    return Box(shape, at, tuple(local), num_parts(tensor))
