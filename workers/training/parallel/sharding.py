"""The data axes: FSDP2 over shard (and replicas), or DDP over replicas."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from holdfast.orchestrator.api.v1alpha1 import Parallelism
from holdfast.workers.session import Session

from .precision import reduce_dtype

Parts = Iterable[nn.Module | list[nn.Module]]


def shard(parts: Parts, session: Session, parallelism: Parallelism, dtype: torch.dtype) -> None:
    """FSDP2 of each part, the root last; `dtype` is that of forward and backward."""
    offload: OffloadPolicy = OffloadPolicy()
    if parallelism.offload == "cpu" and session.device.type == "cuda":
        offload = CPUOffloadPolicy(pin_memory=True)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype(parallelism.precision)
    )
    for part in parts:
        fully_shard(
            part,
            mesh=session.fsdp_mesh,
            reshard_after_forward=parallelism.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP of a model whose values are the same on all ranks already."""
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
        options["init_sync"] = False
    if device.type == "cuda":
        options["device_ids"] = [device.index]
    return DistributedDataParallel(model, **options)


@contextlib.contextmanager
def accumulating(module: nn.Module, num_replicas: int, last: bool) -> Iterator[None]:
    """The context of forward and backward of a micro-batch: gradients are summed over replicas in
    the last one only. FSDP reduces into shards each time, which keeps memory sharded."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule) and num_replicas > 1:
        module.set_requires_all_reduce(last)
    yield
