"""Wraps a model for DDP, FSDP2 or HSDP as the spec says: precision, activation checkpointing,
offload, initial values, gradient accumulation and clipping.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from holdfast.orchestrator.api.v1alpha1 import Parallelism
from holdfast.workers.checkpoint.state import box_of, empty_like, local_of, plain_name
from holdfast.workers.session import Session
from holdfast.workers.training.data import mix

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INIT_BLOCK = 2**20
"""Number of values drawn from one seed. With blocks a rank draws only its own part of a huge
tensor."""

Deviation = Callable[[str], float | None]


def parameter_dtype(parallelism: Parallelism, device: torch.device) -> torch.dtype:
    """Format of parameters in forward and backward; auto is bfloat16 on GPUs, float32 on CPUs."""
    name = parallelism.precision.parameters
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


class Parallel:
    """A model on the mesh of a session; call `module`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        edges: Iterable[nn.Module | list[nn.Module]],
        session: Session,
        parallelism: Parallelism,
        compile_blocks: bool = False,
        divide: Callable[[DeviceMesh], None] | None = None,
    ) -> None:
        """`model` is on the meta device. `blocks` and `edges` (embedding; norm and head) become
        FSDP groups, so that the root group gathers no parameters for long. `divide` divides the
        model over a tensor axis."""
        self.session, self.parallelism = session, parallelism
        self.refuse_non_finite = True
        """False in the warm-up, whose fake collectives leave their outputs uninitialised."""
        self.model = model
        self.dtype = parameter_dtype(parallelism, session.device)
        self.blocks = list(blocks)
        tensor = session.shape.tensor > 1
        if tensor and divide is not None:
            divide(session.mesh["tensor"])
        self._checkpoint_activations()
        if compile_blocks:
            for block in self.blocks:
                block.compile()
        # DDP knows no DTensors, so a model on a tensor axis is replicated by FSDP2 as well.
        self.fully_sharded = session.shape.shard > 1 or tensor
        if self.fully_sharded:
            self._fully_shard(edges)
        self.offloaded = parallelism.offload == "cpu" and session.shape.shard > 1
        self.module: nn.Module = model

    # -- wrapping -----------------------------------------------------------------------------
    def _checkpoint_activations(self) -> None:
        settings = self.parallelism.activation_checkpointing
        if settings.mode == "full":
            chosen = self.blocks[settings.every_nth_block - 1 :: settings.every_nth_block]
            ids = {id(block) for block in chosen}
            for parent in list(self.model.modules()):
                for name, child in list(parent.named_children()):
                    if id(child) in ids:
                        wrapped = checkpoint_wrapper(child)
                        parent.register_module(name, wrapped)
                        self.blocks[self.blocks.index(child)] = wrapped

    def _fully_shard(self, edges: Iterable[nn.Module | list[nn.Module]]) -> None:
        reduce = _DTYPES[self.parallelism.precision.reduce]
        on_gpu = self.session.device.type == "cuda"
        offload: OffloadPolicy = OffloadPolicy()
        if self.parallelism.offload == "cpu" and on_gpu:
            offload = CPUOffloadPolicy(pin_memory=True)
        options: dict[str, Any] = {
            "mesh": self.session.fsdp_mesh,
            "reshard_after_forward": self.parallelism.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=reduce),
            "offload_policy": offload,
        }
        for part in [*self.blocks, *edges, self.model]:
            fully_shard(part, **options)

    def materialize(self, seed: int, deviation: Deviation) -> None:
        """Allocates all parameters, and computes initial values unless a restore will fill them.

        Values depend on (seed, name, position) only, so they are the same on any mesh.
        """
        on_host = self.offloaded or self.session.device.type == "cpu"
        device = torch.device("cpu") if on_host else self.session.device
        # Module.to_empty with a faster empty_like; FSDP2 hooks _apply for both.
        self.model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: empty_like(tensor, device=device)
        )
        if not self.session.restoring:
            for name, parameter in self.model.named_parameters():
                plain = plain_name(name)
                fill(parameter, seed, plain, deviation(plain))
        self.shards = self.session.shards(self.model)
        if not self.fully_sharded and self.session.shape.replicate > 1:
            self.module = self._distributed_data_parallel()

    def _distributed_data_parallel(self) -> nn.Module:
        options: dict[str, Any] = {"gradient_as_bucket_view": True}
        if "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
            options["init_sync"] = False  # all ranks have the same values already
        if self.session.device.type == "cuda":
            options["device_ids"] = [self.session.device.index]
        return DistributedDataParallel(self.model, **options)

    # -- steps --------------------------------------------------------------------------------
    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward: autocast with DDP or one process; FSDP2 casts by itself."""
        if self.fully_sharded or self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.session.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """The context of forward and backward of a micro-batch: gradients are summed over replicas
        in the last one only. FSDP reduces into shards each time, which keeps memory sharded."""
        with self.divided_loss():
            yield from self._reducing(last)

    def divided_loss(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a loss of logits that are divided over the tensor axis."""
        return loss_parallel() if self.session.shape.tensor > 1 else contextlib.nullcontext()

    def _reducing(self, last: bool) -> Iterator[None]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule) and self.session.shape.replicate > 1:
            self.module.set_requires_all_reduce(last)
        yield

    def reduce_and_clip(self, loss: Tensor, max_norm: float) -> tuple[float, float]:
        """Clips gradients to `max_norm` (0: no clipping) and sums `loss`, which is the same on the
        ranks of a tensor axis, over all data-parallel ranks. Call it between backward and the
        optimizer's step.

        Returns (summed loss, gradient norm). Raises FloatingPointError if the norm is not finite.
        """
        reduced = self.shards.reduce_and_clip(loss / self.session.shape.tensor, max_norm)
        total, norm = torch.stack(reduced).tolist()
        if self.refuse_non_finite and not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}, the loss {total}")
        return total, norm


def fill(parameter: Tensor, seed: int, name: str, deviation: float | None) -> None:
    """Initial values of one parameter: ones, or normal values from (seed, name, position).

    Value number i of the whole tensor comes from block i // _INIT_BLOCK, so values do not depend on
    the mesh, and a rank draws only the blocks that overlap the rows of its part.
    """
    with torch.no_grad():
        local = local_of(parameter)
        if deviation is None:
            local.fill_(1.0)
            return
        if local.numel() == 0:
            return
        box = box_of(parameter)
        if tuple(local.shape[1:]) == tuple(box.global_shape[1:]):  # whole rows
            width = math.prod(box.global_shape[1:])
            begin = (box.offset[0] if box.offset else 0) * width
            _draw(local.view(-1), begin, parameter.numel(), seed, name, deviation)
            return
        width = box.global_shape[1]  # of a matrix that is divided by columns
        first, rows = box.offset[1], max(1, _INIT_BLOCK // width)
        for at in range(0, local.shape[0], rows):
            part = local[at : at + rows]
            whole = torch.empty(part.shape[0], width, dtype=local.dtype, device=local.device)
            begin = (box.offset[0] + at) * width
            _draw(whole.view(-1), begin, parameter.numel(), seed, name, deviation)
            part.copy_(whole[:, first : first + part.shape[1]])


def _draw(flat: Tensor, begin: int, total: int, seed: int, name: str, deviation: float) -> None:
    """The values from position `begin` on of a tensor with `total` values."""
    end = begin + flat.numel()
    key = xxhash.xxh3_64_intdigest(name.encode())
    generator = torch.Generator(device=flat.device)
    for block in range(begin // _INIT_BLOCK, -(-end // _INIT_BLOCK)):
        first = block * _INIT_BLOCK
        size = min(_INIT_BLOCK, total - first)
        generator.manual_seed(mix(seed, key, block))
        values = torch.empty(size, device=flat.device).normal_(0.0, deviation, generator=generator)
        low, high = max(begin, first), min(end, first + size)
        flat[low - begin : high - begin] = values[low - first : high - first]
