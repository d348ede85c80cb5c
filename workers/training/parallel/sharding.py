"""The data axes: FSDP2 over shard (and replicas), or DDP over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
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
    """FSDP2 of each part, the root last; `dtype` is used in forward and backward."""
    offload: OffloadPolicy = OffloadPolicy()
    if offloads(session, parallelism):
        offload = CPUOffloadPolicy(pin_memory=True)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype(parallelism.precision)
    )
    # A pipeline keeps the parameters of its stages: each would be gathered again for every
    # micro-batch, and torch's zero bubble schedules omit gradients of parameters that are not
    # gathered when the backward of a stage begins.
    reshard = session.shape.pipeline == 1 and parallelism.fsdp_settings.reshard_after_forward
    for part in parts:
        fully_shard(
            part,
            mesh=session.fsdp_mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            offload_policy=offload,
        )


def offloads(session: Session, parallelism: Parallelism) -> bool:
    """True if parameters, gradients and optimizer state are in main memory. With `shard: world` a
    job may shrink to whole copies, which FSDP2 wraps beside a tensor axis or a pipeline; they are
    planned on the device."""
    sharded = session.shape.num_fsdp_shards > 1
    return parallelism.offload == "cpu" and session.device.type == "cuda" and sharded


def prefetch(in_order: Sequence[nn.Module], num_blocks: int) -> None:
    """FSDP2 gathers the parameters of `num_blocks` modules ahead, in forward and backward."""
    modules: list[FSDPModule] = [part for part in in_order if isinstance(part, FSDPModule)]
    for at, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[at + 1 : at + 1 + num_blocks])
        module.set_modules_to_backward_prefetch(modules[max(0, at - num_blocks) : at][::-1])


def replicate(model: nn.Module, device: torch.device, parallelism: Parallelism) -> nn.Module:
    """DDP of a model whose values are the same on all ranks already.

    DDP rearranges its buckets after the first step of a process, and the order of the sums in an
    all-reduce follows from the places in them. A worker that was restarted would sum its first step
    in another order than an undisturbed one. With `find_unused_parameters` the buckets stay, for a
    walk through the graph in every step; a static graph (the user's choice) excludes it.
    """
    settings = parallelism.ddp_settings
    options: dict[str, Any] = {
        "bucket_cap_mb": settings.bucket_mib,
        "static_graph": settings.static_graph,
        "init_sync": False,
        "find_unused_parameters": not settings.static_graph,  # all are used
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
    }
    if device.type == "cuda":
        options["device_ids"] = [device.index]
    module = DistributedDataParallel(model, **options)
    # With find_unused_parameters DDP copies the output, here the logits, which nothing changes.
    module._set_ddp_sink_clone(False)
    if parallelism.precision.reduce == "bfloat16":
        module.register_comm_hook(None, bf16_compress_hook)
    return module


@contextlib.contextmanager
def accumulating(module: nn.Module, parallelism: Parallelism, last: bool) -> Iterator[None]:
    """The context of forward and backward of a micro-batch. DDP sums gradients over replicas in the
    last one only, and so does HSDP. FSDP2 reduces into shards each time, which keeps memory
    sharded, unless the gradients are to stay whole."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        settings = parallelism.fsdp_settings
        if settings.accumulate_gradients == "sharded":
            module.set_requires_all_reduce(last)
        else:
            module.set_requires_gradient_sync(last)
            if settings.reshard_after_forward is False:  # ZeRO-1: gathered once a step
                module.set_reshard_after_backward(last)
    yield
