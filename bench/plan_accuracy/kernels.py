"""Memory that CUDA's kernels keep and allocate, on fake tensors of the CPU.

A machine without a GPU cannot dispatch to CUDA's kernels, not even with fake tensors: backward asks
for the device. Where CUDA keeps other tensors than the CPU does, the operator of CUDA takes the
place of the CPU's: its results have the same shapes. Two operators of the recipe differ, and one
optimizer:

* rms_norm: the fused kernel keeps its input and one float32 for each row. On CPUs it consists of
  plain operators that keep several tensors of the input's size, in float32.
* scaled_dot_product_attention: the flash kernel keeps queries, keys, values, the output and the
  float32 logarithm of the sums. That of CPUs keeps the same; the operator of CUDA is used so that
  its backward is CUDA's too.

AdamW of 8 bits is compiled for GPUs, and keeps its intermediate values in registers; on CPUs each
is a tensor. DTensor gathers in place of an all-to-all on CPUs, as gloo has none.

The same holds for offload: with main memory and device both on the CPU, copies between them are
left out by torch, so `offload_copies` makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types

from holdfast.workers.training.optimizers import adamw8bit
from holdfast.workers.training.parallel import sharding

from .storages import HOST, StorageTracker


class _FusedNorm(torch.autograd.Function):
    """Shapes of aten._fused_rms_norm and its backward; no values."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _OnLocal(torch.autograd.Function):
    """The same for an input that is divided by sequence or heads: the gradient of the weight is
    this rank's part of a sum."""

    @staticmethod
    def forward(context: Any, x: DTensor, weight: DTensor) -> DTensor:
        local = x._local_tensor
        rows = local.new_empty((*local.shape[:-1], 1), dtype=torch.float32)
        context.save_for_backward(x, weight, rows)
        return _like(x, torch.empty_like(local), x.placements)

    @staticmethod
    def backward(context: Any, gradient: DTensor) -> tuple[DTensor, DTensor]:
        x, weight, _ = context.saved_tensors
        kinds = [Partial() if isinstance(p, Shard) else Replicate() for p in x.placements]
        of_weight = torch.empty_like(weight._local_tensor)
        of_x = _like(x, torch.empty_like(x._local_tensor), x.placements)
        return of_x, _like(weight, of_weight, kinds)


def _like(whole: DTensor, local: Tensor, placements: Any) -> DTensor:
    return DTensor.from_local(
        local, whole.device_mesh, placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


_rms_norm = F.rms_norm


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is None or x.dtype != weight.dtype:
        return _rms_norm(x, shape, weight, eps)  # CUDA does not fuse it then
    norm: Any = _OnLocal if isinstance(x, DTensor) else _FusedNorm
    result: Tensor = norm.apply(x, weight)
    return result


def _attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **_: Any) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.dtype == torch.float32:  # the flash kernel has none; the memory-efficient one does
        return _sdpa(q, k, v, is_causal=is_causal, **_)
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return result


_sdpa = F.scaled_dot_product_attention
_attention.__name__ = "scaled_dot_product_attention"  # by which context_parallel replaces it


def _all_to_all(
    part: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> Tensor:
    """DTensor gathers the whole on CPUs, as gloo has no all-to-all."""
    name = mesh.get_group(mesh_dim).group_name
    result: Tensor = torch.ops._dtensor.shard_dim_alltoall(part, gather_dim, shard_dim, name)
    return result


@contextlib.contextmanager
def of_cuda() -> Iterator[None]:
    """The operators of CUDA in place of the CPU's."""
    with (
        mock.patch.object(F, "rms_norm", _norm),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(placement_types, "shard_dim_alltoall", _all_to_all),
        mock.patch.object(adamw8bit.AdamW8bit, "_step_parameter", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def ddp_futures() -> Iterator[None]:
    """The futures of fake process groups have no tensors, which DDP asks for. These hooks allocate
    and send what DDP does."""
    replicate = sharding.replicate

    def with_hook(model: Any, device: Any, parallelism: Any) -> Any:
        compress = parallelism.precision.reduce == "bfloat16"
        plain = parallelism.model_copy(
            update={"precision": parallelism.precision.model_copy(update={"reduce": "float32"})}
        )
        module = replicate(model, device, plain)
        module.register_comm_hook(None, _reduce_bfloat16 if compress else _reduce)
        module.reducer = _Reducer(module.reducer)
        return module

    with mock.patch.object(sharding, "replicate", with_hook):
        yield


class _Reducer:
    """Reducer that keeps the order of the parameters: after its first step, DDP reads another order
    from a tensor. The buckets are as large without it."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    return _done(bucket.buffer())


def _reduce_bfloat16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    compressed = bucket.buffer().to(torch.bfloat16)
    dist.all_reduce(compressed)
    bucket.buffer().copy_(compressed)
    return _done(bucket.buffer())


# DDP compares these annotations with the class, and gets text from this file's __future__ import.
for _hook in (_reduce, _reduce_bfloat16):
    _hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }


def _done(result: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(result)
    return future


@contextlib.contextmanager
def offload_copies(tracker: StorageTracker) -> Iterator[None]:
    """FSDP2 with CPUOffloadPolicy: shards go to the device to be gathered, and reduced gradients
    to main memory, as copies."""
    fully_shard, to = sharding.fully_shard, torch.Tensor.to
    reduce = _fsdp_param_group.foreach_reduce

    def all_gather_inputs(param: Any) -> list[Tensor]:
        copy = param._sharded_param_data.clone()
        return [_fsdp_param._to_dtype_if_needed(copy, param.param_dtype)]

    def copied(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if "non_blocking" not in options:
            return to(tensor, *args, **options)
        before, tracker.region = tracker.region, HOST
        copy = tensor.clone()
        tracker.region = before
        return copy

    def foreach_reduce(*args: Any, **options: Any) -> Any:
        with mock.patch.object(torch.Tensor, "to", copied):
            return reduce(*args, **options)

    def with_policy(*args: Any, **options: Any) -> Any:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return fully_shard(*args, **options)

    with (
        mock.patch.object(sharding, "fully_shard", with_policy),
        mock.patch.object(_fsdp_param.FSDPParam, "all_gather_inputs", property(all_gather_inputs)),
        mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce),
    ):
        yield
