"""A model on the mesh of a session: wrapped for its axes, its initial values, and the forward and
backward of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from holdfast.orchestrator.api.v1alpha1 import Parallelism
from holdfast.workers.checkpoint.param_names import plain_name
from holdfast.workers.checkpoint.tensors import empty_like
from holdfast.workers.session import Session
from holdfast.workers.session.loss import CudaScalars
from holdfast.workers.training.data import MicroBatch, divide_batches

from . import float8, sharding
from .activations import checkpoint_blocks
from .pipeline import Pipeline
from .precision import LossScale, autocast, parameter_dtype

Loss = Callable[[Tensor, MicroBatch], Tensor]
"""(output of the model, micro-batch) -> this rank's part of the loss, a scalar."""


class Parallel:
    """A model on the mesh of a session."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        edges: Iterable[nn.Module | list[nn.Module]],
        session: Session,
        parallelism: Parallelism,
        compile_blocks: bool = False,
        divide: Callable[[DeviceMesh], None] | None = None,
        pipeline: Pipeline | None = None,
        prepare: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """`model` is on the meta device. `blocks` and `edges` (embedding; norm and head) become
        FSDP groups, so that the root group gathers no parameters for long. `divide` divides the
        model over a tensor axis; `pipeline` has left in it what is on this rank. `prepare` may give
        a block values before it is sharded."""
        self.session, self.parallelism = session, parallelism
        self.refuse_non_finite = True
        """False in the warm-up, whose fake collectives leave their outputs uninitialised."""
        on_gpu = session.device.type == "cuda"
        self.scalars = CudaScalars() if on_gpu else None
        """Reads the loss and the norm of a step."""
        self.arguments: Callable[[MicroBatch], dict[str, Any]] = lambda batch: {}
        """Arguments of the model beside the inputs."""
        self.call: Callable[[nn.Module, MicroBatch], Tensor] = lambda module, batch: module(
            batch.inputs_bt, batch.positions_t, **self.arguments(batch)
        )
        """The forward of a micro-batch."""
        self.model = model
        self.dtype = parameter_dtype(parallelism.precision, session.device)
        tensor = session.shape.tensor > 1
        if tensor and divide is not None:
            divide(session.meshes.axis("tensor"))
        blocks = list(blocks)
        if parallelism.precision.linear == "float8":
            float8.expect_device(session.device)
            float8.convert(blocks, float8.recipe_of(session.device))
        self.blocks = checkpoint_blocks(model, blocks, parallelism.activation_checkpointing)
        if compile_blocks:
            for block in self.blocks:
                block.compile()
        self.pipeline = pipeline
        if pipeline is not None:
            pipeline.arguments = lambda batch: self.arguments(batch)
        # DDP knows no DTensors, so a model on a tensor axis is replicated by FSDP2 as well; and a
        # stage of a pipeline, which reduces its gradients after the last of its micro-batches.
        divided = session.shape.num_fsdp_shards > 1 or tensor
        self.fully_sharded = divided or pipeline is not None
        edges, roots = list(edges), [model] if pipeline is None else pipeline.divide()
        for block in self.blocks:
            if prepare is not None:
                prepare(block)
            if self.fully_sharded:
                sharding.shard([block], session, parallelism, self.dtype)
        if self.fully_sharded:
            sharding.shard([*edges, *roots], session, parallelism, self.dtype)
            if ahead := parallelism.fsdp_settings.prefetch_blocks:
                in_order = [*edges[:1], *self.blocks, *edges[1:]]
                modules = [part[0] if isinstance(part, list) else part for part in in_order]
                sharding.prefetch(modules, ahead)
        self.offloaded = sharding.offloads(session, parallelism)
        self.context = session.meshes.axis("context") if session.shape.context > 1 else None
        self.module: nn.Module = model
        self.loss_scale = LossScale() if self.dtype == torch.float16 else None
        """State, for `extra` of the checkpoint."""

    def materialize(self, initialise: Callable[[nn.Module], None]) -> None:
        """Allocates all parameters that are on the meta device; `initialise` gives them values."""
        on_host = self.offloaded or self.session.device.type == "cpu"
        device = torch.device("cpu") if on_host else self.session.device

        # Module.to_empty with a faster empty_like; FSDP2 hooks _apply for both.
        def allocated(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return empty_like(tensor, device=device)
            return tensor if tensor.device.type == device.type else tensor.to(device)

        self.model._apply(allocated)  # type: ignore[no-untyped-call]
        initialise(self.model)
        self.shards = self.session.shards(self.model)
        if not self.fully_sharded and self.session.shape.replicate > 1:
            self.module = sharding.replicate(self.model, self.session.device, self.parallelism)

    def named_shards(self) -> dict[str, nn.Parameter]:
        """Plain name -> this rank's part of the parameter."""
        names = (plain_name(name) for name, _ in self.model.named_parameters())
        return dict(zip(names, self.shards.parameters(), strict=True))

    # -- steps --------------------------------------------------------------------------------
    def forward_backward(self, batches: Sequence[MicroBatch], loss_of: Loss) -> Tensor:
        """Gradients of the sum of the losses over all micro-batches and data-parallel ranks.

        Returns the sum of this rank's losses, a scalar on the session's device.
        """
        if self.pipeline is not None:
            with self._divided_loss():
                return self.pipeline.train(batches, loss_of, self.dtype, self._factor)
        total = torch.zeros((), device=self.session.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with (
                self._divided_loss(),
                sharding.accumulating(self.module, self.parallelism, last),
                divide_batches(self.context, [batch.to(self.session.device)]) as (part,),
            ):
                loss = self._loss(part, loss_of)
                (loss * self._factor).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            if len(batches) > 1:
                self.session.tick()
        return total

    def evaluate(self, batches: Sequence[MicroBatch], loss_of: Loss) -> Tensor:
        """The sum of the losses over all micro-batches and ranks, without gradients."""
        total = torch.zeros((), device=self.session.device)
        self.module.eval()
        with torch.no_grad(), self._divided_loss():
            if self.pipeline is not None:
                total += self.pipeline.evaluate(batches, loss_of, self.dtype)
            for batch in batches if self.pipeline is None else ():
                whole = [batch.to(self.session.device)]
                with divide_batches(self.context, whole) as (part,):
                    total += self._loss(part, loss_of)
                self.session.tick()
        self.module.train()
        total /= self.session.shape.tensor  # whose ranks have the same loss
        if self.session.world_size > 1:
            torch.distributed.all_reduce(total)
        return total

    def _loss(self, batch: MicroBatch, loss_of: Loss) -> Tensor:
        with autocast(self.dtype, self.session.device, self.fully_sharded):
            output = self.call(self.module, batch)
        return loss_of(output, batch)

    def _divided_loss(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a loss of logits that are divided over the tensor axis, and of its
        backward."""
        return loss_parallel() if self.session.shape.tensor > 1 else contextlib.nullcontext()

    @property
    def _factor(self) -> float:
        """Factor of a loss for its backward. The reduction averages over ranks; this makes it the
        sum. A loss scale takes its place: both would overflow sooner."""
        return self._num_averaged if self.loss_scale is None else self.loss_scale.value

    @property
    def _num_averaged(self) -> int:
        """Number of ranks over which gradients are averaged: those of the data and of a context
        axis."""
        return self.session.data_parallel_size * self.session.shape.context

    def reduce_and_clip(self, loss: Tensor, max_norm: float) -> Callable[[], tuple[float, float]]:
        """Clips gradients to `max_norm` (0: no clipping) and sums `loss`, which is the same on the
        ranks of a tensor axis, and 0 on ranks without the last stage of a pipeline, over all ranks.
        Call it between backward and the optimizer's step.

        What it returns gives (summed loss, gradient norm), and raises FloatingPointError if the
        norm is not finite, unless there is a loss scale. Call that after the optimizer's step,
        before the step is reported: a device then has work while the host reads.
        """
        local = loss / self.session.shape.tensor
        scale = self._factor / self._num_averaged
        reduced = self.shards.reduce_and_clip(local, max_norm, scale)
        reader = self.scalars
        pending = [tensor if reader is None else reader.start(tensor) for tensor in reduced]

        def numbers() -> tuple[float, float]:
            total, norm = (float(p) if reader is None else reader.value(p) for p in pending)
            scaled = self.loss_scale is not None
            if self.refuse_non_finite and not scaled and not math.isfinite(norm):
                raise FloatingPointError(f"the gradient norm is {norm}, the loss {total}")
            return total, norm

        return numbers

    def may_step(self, numbers: Callable[[], tuple[float, float]]) -> bool:
        """True if the optimizer may step on these gradients; `numbers` is the result of
        reduce_and_clip. With a loss scale the host waits for the norm; all ranks decide alike."""
        if self.loss_scale is None or not self.refuse_non_finite:
            return True
        return self.loss_scale.update(numbers()[1])
