"""Two training steps of the recipe as one rank of a mesh takes them, without the other ranks.

Process groups move no data, and tensors have none. Model, optimizer, loss and parallel code are the
recipe's own. The second step is measured: the optimizer has its state by then, and DDP its buckets.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.orchestrator.api.v1alpha1 import Pretrain, TrainingJob
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.checkpoint import tensors
from holdfast.workers.session.core import Session
from holdfast.workers.session.distributed import Meshes, RankEnv
from holdfast.workers.training import loop
from holdfast.workers.training.parallel.model import Parallel
from holdfast.workers.training.parallel.pipeline import StageModule
from holdfast.workers.training.recipes import pretrain

from . import kernels
from .sent import Sent
from .storages import HOST, Peak, StorageTracker

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer state"
GATHERED, WHOLE, REDUCED = "gathered weights", "whole gradients", "buffers of the reduction"
PHASES = ("forward", "loss", "loss backward", "backward", "clip", "optimizer")
"""Phases of a step. The backward's phase is followed by the part of the model whose gradient is
computed: `backward of blocks.3`."""


_NUMBERS = itertools.count()
"""torch caches what it knows of a mesh, with its process groups: each trace has one of its own."""


@dataclass
class Measured:
    """Memory of one rank, in bytes."""

    peaks: dict[str, Peak]
    """Phase -> peak of the second step."""
    first_peak: int
    """Peak of the first step."""
    states: dict[str, int]
    """Weights and optimizer state, on the device or, with offload, in main memory."""
    sent: dict[tuple[str, str], int]
    """(kind, axes) -> bytes of the second step."""
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def states_bytes(self) -> int:
        """A gradient has the size of its weight: both are in float32."""
        return 2 * self.states[WEIGHTS] + self.states[OPTIMIZER]

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda one: one.num_bytes)


class _Session(Session):
    """A rank without initial values, which no figure depends on."""

    @property
    def restoring(self) -> bool:
        return True


class _NoData:
    """Samples of the right shape."""

    def __init__(self, config: Pretrain, directory: str) -> None:
        self._length, self.end = config.data.sequence_length, sys.maxsize

    def num_targets(self, indices: Sequence[int], evaluation: bool = False) -> int:
        return len(indices) * self._length

    def batch(self, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        shape = len(indices), self._length
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


class _NoScalars:
    """Fake tensors have no values to read."""

    def start(self, scalar: Tensor) -> None:
        return None

    def value(self, pending: None) -> float:
        return 1.0


def measure(job: TrainingJob, mesh: Mesh, *, cuda: bool = True) -> Measured:
    """The rank that needs most, with the bytes of the one that sends most: of a pipeline each
    stage is traced. `cuda`: kernels of CUDA."""
    ranks = [mesh.rank(pipeline=stage) for stage in range(mesh.pipeline)]
    found = [measure_rank(job, mesh, rank, cuda=cuda) for rank in ranks]
    most = max(found, key=lambda one: one.peak.num_bytes)
    sends = max(found, key=lambda one: sum(one.sent.values()))
    states = max(found, key=lambda one: one.states_bytes)
    return replace(most, sent=sends.sent, calls=sends.calls, states=states.states)


Trainers = Callable[..., contextlib.AbstractContextManager[pretrain.Trainer]]


def measure_rank(
    job: TrainingJob, mesh: Mesh, rank: int, *, cuda: bool = True, trainers: Trainers | None = None
) -> Measured:
    """`trainers` is in place of trainer_on_fakes."""
    offload = job.spec.parallelism.offload == "cpu" and mesh.num_fsdp_shards > 1
    sent, tracker = Sent(mesh, rank), StorageTracker()
    tracker.observers.append(sent.observe)
    with contextlib.ExitStack() as stack:
        if cuda:
            stack.enter_context(kernels.of_cuda())
        if offload:
            stack.enter_context(kernels.offload_copies(tracker))
        stack.enter_context(_labels(tracker))
        made = (trainers or trainer_on_fakes)(job, mesh, rank, tracker)
        trainer = stack.enter_context(made)
        _prepare(trainer, tracker, offload)
        for step in range(2):
            sent.clear()
            tracker.prefix, tracker.phase = f"{step} ", "forward"
            loop.train_step(trainer, step)
        states = _states(trainer, tracker)
    peaks = tracker.peaks(lambda phase: phase.startswith("1 "))
    first = tracker.peaks(lambda phase: phase.startswith("0 "))
    return Measured(
        {phase[2:]: peak for phase, peak in peaks.items()},
        max(peak.num_bytes for peak in first.values()),
        states,
        dict(sent.num_bytes),
        dict(sent.calls),
    )


@contextlib.contextmanager
def trainer_on_fakes(
    job: TrainingJob, mesh: Mesh, rank: int, tracker: StorageTracker | None = None
) -> Iterator[pretrain.Trainer]:
    """The recipe's objects of one rank, with process groups that move nothing, and fake tensors
    from the first parameter on."""
    modes = [
        FakeTensorMode(allow_non_fake_inputs=True),
        _numbers(),
        _AllUsed(),
        *([tracker] if tracker else []),
    ]
    with (
        fake_groups(mesh.world_size, rank),
        kernels.ddp_futures(),
        trainer_of(job, mesh, rank, *modes) as trainer,
    ):
        yield trainer


@contextlib.contextmanager
def trainer_of(
    job: TrainingJob, mesh: Mesh, rank: int, *modes: contextlib.AbstractContextManager[Any]
) -> Iterator[pretrain.Trainer]:
    """The recipe's objects of one rank, without data and initial values. `modes` are entered before
    the first parameter has memory, and not earlier: the device meshes are tensors with values."""
    recipe = job.spec.entrypoint.recipe
    assert recipe is not None
    materialize = Parallel.materialize
    with contextlib.ExitStack() as stack:

        def with_modes(*args: Any) -> None:
            for one in modes:
                stack.enter_context(one)
            materialize(*args)

        stack.enter_context(mock.patch.object(pretrain, "Dataset", _NoData))
        session = _session(mesh, rank)
        with mock.patch.object(Parallel, "materialize", with_modes):
            trainer = pretrain.build(job, recipe.config, session)
        trainer.parallel.refuse_non_finite = False
        trainer.parallel.scalars = _NoScalars()
        yield trainer


@contextlib.contextmanager
def fake_groups(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _session(mesh: Mesh, rank: int) -> Session:
    """A session with its meshes, which must not be made of fake tensors."""
    session = _Session(RankEnv(rank=rank, world_size=mesh.world_size), torch.device("cpu"), mesh)
    session.meshes = Meshes(mesh, "cpu", prefix=f"trace{next(_NUMBERS)}_")
    if mesh.tensor * mesh.context * mesh.pipeline > 1:
        session.mesh  # noqa: B018 (made on first use)
    session.fsdp_mesh  # noqa: B018
    return session


@contextlib.contextmanager
def _numbers() -> Iterator[None]:
    """Numbers that fake tensors do not have: the addresses that Shards compares, and the offset of
    a part, which DTensor computes as a tensor."""

    def data_ptr(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()

    def shape_and_offset(*args: Any) -> Any:
        with unset_fake_temporarily():
            return offsets(*args)

    offsets = tensors.compute_local_shape_and_global_offset
    with (
        mock.patch.object(torch.Tensor, "data_ptr", data_ptr),
        mock.patch.object(tensors, "compute_local_shape_and_global_offset", shape_and_offset),
    ):
        yield


class _AllUsed(TorchDispatchMode):
    """DDP reads after a step which parameters some rank has used: in the recipe all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.int32:
            return 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _labels(tracker: StorageTracker) -> Iterator[None]:
    """Categories of what FSDP2 allocates."""
    group = _fsdp_param_group
    params = group.FSDPParamGroup
    gather, copy_out = params.unshard, params.wait_for_unshard
    reduce, shapes = group.foreach_reduce, ShardingPropagator._propagate_tensor_meta_non_cached

    def whole_shapes(*args: Any) -> Any:
        """DTensor computes shapes with fake tensors of its own, of whole size."""
        before, tracker.paused = tracker.paused, True
        try:
            return shapes(*args)
        finally:
            tracker.paused = before

    def of(category: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def labelled(*args: Any, **options: Any) -> Any:
            before, tracker.region = tracker.region, category
            try:
                return function(*args, **options)
            finally:
                tracker.region = before

        return labelled

    def foreach_reduce(params: Any, gradients: list[Tensor], *args: Any, **options: Any) -> Any:
        for gradient in gradients:
            tracker.mark(gradient, WHOLE)
        result = of(REDUCED, reduce)(params, gradients, *args, **options)
        for param in params:
            tracker.mark(param.sharded_param.grad, GRADIENTS)
        return result

    with (
        mock.patch.object(params, "unshard", of(GATHERED, gather)),
        mock.patch.object(params, "wait_for_unshard", of(GATHERED, copy_out)),
        mock.patch.object(group, "foreach_reduce", foreach_reduce),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", whole_shapes),
    ):
        yield


def _prepare(trainer: pretrain.Trainer, tracker: StorageTracker, offload: bool) -> None:
    """Names of phases and modules, from the recipe's own functions."""
    parallel = trainer.parallel
    for parameter in parallel.shards.parameters():
        tracker.mark(parameter, HOST if offload else WEIGHTS)
    for name, module in parallel.model.named_modules():
        _name_module(module, name, tracker)
    for name, module in parallel.model.named_modules():
        if name in ("embedding", "norm") or re.fullmatch(r"blocks\.\d+", name):
            module.register_forward_hook(partial(_name_backward, tracker, name))
    if parallel.pipeline is not None:
        for part in parallel.pipeline._parts.values():
            _phase_of_stage(part, tracker)
    loss, clip, step = trainer.loss, parallel.reduce_and_clip, trainer.optimizer.step

    def traced_loss(output: Tensor, *args: Any) -> Tensor:
        tracker.phase = "loss"
        _name_backward(tracker, "head", None, None, output)
        result = loss(output, *args)
        tracker.phase = "loss backward"
        return result

    def traced_clip(*args: Any) -> Any:
        tracker.phase = "clip"
        before, tracker.region = tracker.region, HOST if offload else ""
        result = clip(*args)
        for parameter in parallel.shards.parameters():
            tracker.mark(parameter.grad, HOST if offload else GRADIENTS)
        tracker.region = before
        return result

    def traced_step(*args: Any) -> Any:
        in_backward = trainer.config.optimizer.in_backward and tracker.phase.startswith("backward")
        if not in_backward:
            tracker.phase = "optimizer"
        before, tracker.region = tracker.region, HOST if offload else ""
        result = step(*args)
        _mark_optimizer(trainer, tracker, HOST if offload else OPTIMIZER)
        tracker.region = before
        return result

    trainer.loss = traced_loss  # type: ignore[method-assign]
    parallel.reduce_and_clip = traced_clip  # type: ignore[method-assign]
    trainer.optimizer.step = traced_step  # type: ignore[method-assign]
    original = parallel._loss

    def traced_forward(*args: Any) -> Tensor:
        tracker.phase = "forward"
        return original(*args)

    parallel._loss = traced_forward  # type: ignore[method-assign]


def _name_module(module: nn.Module, name: str, tracker: StorageTracker) -> None:
    def enter(*_: Any) -> None:
        tracker.modules.append(name)

    def leave(*_: Any) -> None:
        tracker.modules.pop()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _name_backward(
    tracker: StorageTracker, name: str, module: object, inputs: object, output: Tensor
) -> None:
    """The gradient of a part's output begins the backward of this part."""

    def begin(gradient: Tensor) -> None:
        tracker.phase = f"backward of {name}"

    if output.requires_grad:
        output.register_hook(begin)


def _phase_of_stage(part: StageModule, tracker: StorageTracker) -> None:
    def enter(*_: Any) -> None:
        tracker.phase = "forward"

    def leave(*_: Any) -> None:
        if tracker.phase == "forward":
            tracker.phase = "backward"

    part.register_forward_pre_hook(enter, prepend=True)
    part.register_forward_hook(leave)


def _optimizer_states(trainer: pretrain.Trainer) -> Iterator[Tensor]:
    optimizer = trainer.optimizer
    for one in getattr(optimizer, "optimizers", {"": optimizer}).values():
        for state in one.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _mark_optimizer(trainer: pretrain.Trainer, tracker: StorageTracker, category: str) -> None:
    for value in _optimizer_states(trainer):
        tracker.mark(value, category)


def _states(trainer: pretrain.Trainer, tracker: StorageTracker) -> dict[str, int]:

    def size(tensors: Iterator[Tensor]) -> int:
        blocks = {id(b): b.num_bytes for t in tensors if (b := tracker.block_of(t)) is not None}
        return sum(blocks.values())

    return {
        WEIGHTS: size(iter(trainer.parallel.shards.parameters())),
        OPTIMIZER: size(_optimizer_states(trainer)),
    }
