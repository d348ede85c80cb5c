"""Builds and stages a small sharded model as any rank of any mesh, with fake process groups."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.workers.checkpoint.layout import Bytes, Header
from holdfast.workers.checkpoint.restore import restore
from holdfast.workers.checkpoint.shard_sources import MappedShard, UnreadableCheckpoint
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import Extra, TrainingState
from holdfast.workers.checkpoint.tensors import box_of, empty_like, local_of
from holdfast.workers.checkpoint.twin_parts import WritableBuffer
from holdfast.workers.checkpoint.upload import Uploader


class Net(nn.Module):
    """Shapes that no shard count divides, a scalar, a bias, and a buffer."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, 5, bias=False)
        self.third = nn.Linear(5, 2)
        self.register_buffer("seen", torch.tensor([3, 1], dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


class Memory:
    """Staging buffers without an agent."""

    def __init__(self) -> None:
        self.file = b""
        self.requested = 0
        self.put_back_buffers: list[int] = []
        self._memory: mmap.mmap | None = None
        self._prepare: Callable[[Bytes], None] = lambda memory: None

    def prepare_with(self, prepare: Callable[[Bytes], None]) -> None:
        self._prepare = prepare

    def request_buffers(self, num_bytes: int) -> None:
        self.requested += 1
        self._memory = mmap.mmap(-1, num_bytes)
        self._prepare(np.frombuffer(self._memory, dtype=np.uint8))

    def take_buffer(self, step: int, num_bytes: int, layout: int) -> WritableBuffer:
        assert self._memory is not None
        return WritableBuffer(0, self._memory)

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        assert self._memory is not None
        self.file = self._memory[:num_bytes]

    def put_back(self, buffer: int) -> None:
        self.put_back_buffers.append(buffer)


class ShardInBytes:
    """A shard file that is a value."""

    def __init__(self, content: bytes, name: str) -> None:
        from holdfast.workers.checkpoint.layout import parse_header

        self.name, self._parse = name, parse_header
        self._bytes = np.frombuffer(content, dtype=np.uint8)

    def header(self) -> Header:
        return self._parse(self._bytes.tobytes(), self.name)

    def data(self, begin: int, end: int):  # type: ignore[no-untyped-def]
        at = self.header().data_start
        return self._bytes[at + begin : at + end]

    def entries(self, wanted, tick):  # type: ignore[no-untyped-def]
        return ((entry, self.data(entry.begin, entry.end)) for entry in wanted)


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    # torch keeps what it derives for one mesh for all equal ones, the calling rank not looked at.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fill(parameter: torch.Tensor, seed: int, name: str) -> None:
    """Values that depend on seed, name and position only, so they are the same on each mesh."""
    box = box_of(parameter)
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    whole = torch.empty(box.global_shape).normal_(generator=generator)
    for dim, (begin, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        whole = whole.narrow(dim, begin, size)
    with torch.no_grad():
        local_of(parameter).copy_(whole)


def build(replicate: int, shard: int, seed: int, width: int = 7) -> tuple[Net, torch.optim.AdamW]:
    """A rank's model (first values from `seed`) and its optimizer, without state."""
    with torch.device("meta"):
        model = Net(width)
    if shard > 1:
        names = ("replicate", "shard") if replicate > 1 else ("shard",)
        sizes = (replicate, shard) if replicate > 1 else (shard,)
        fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    model._apply(lambda t: empty_like(t, device=torch.device("cpu")))
    for name, parameter in model.named_parameters():
        fill(parameter, seed, name)
    model.seen.copy_(torch.tensor([3, 1]))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One optimizer step with gradients from `seed`: the same at any world size."""
    for name, parameter in model.named_parameters():
        gradient = empty_like(parameter)
        fill(gradient, seed, name)
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def staged(
    replicate: int, shard: int, steps: int = 2, extra: Extra = None, width: int = 7
) -> dict[int, bytes]:
    """Files of all shards after `steps` steps of a job on this mesh."""
    files = {}
    for rank in range(shard):
        with as_rank(rank, replicate * shard):
            model, optimizer = build(replicate, shard, seed=1, width=width)
            state = TrainingState(model, optimizer, extra)
            for number in range(steps):
                step(model, optimizer, seed=100 + number)
            memory = Memory()
            stager = Stager(
                state, memory, generation=1, shard=rank, num_shards=shard,
                device=torch.device("cpu"),
            )  # fmt: skip
            stager.stage(steps - 1)
            files[rank] = memory.file
    return files


def staged_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra = None, step: int = 0
) -> bytes:
    """The file of one process that holds everything."""
    memory = Memory()
    Stager(
        TrainingState(model, optimizer, extra), memory,
        generation=1, shard=0, num_shards=1, device=torch.device("cpu"),
    ).stage(step)  # fmt: skip
    return memory.file


def restore_alone(
    file: bytes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extra: Extra = None,
    step: int = 0,
) -> TrainingState:
    """Fills them as one process that reads a mapped file does."""
    state = TrainingState(model, optimizer, extra)
    with tempfile.TemporaryFile() as stream:
        stream.write(file)
        stream.flush()
        shard = MappedShard(os.dup(stream.fileno()), len(file), "file")
    values = restore(state, lambda _: shard, shard=0, num_shards=1, num_stored=1, step=step)
    state.import_extra(values)
    return state


def restored(
    files: dict[int, bytes], replicate: int, shard: int, rank: int, after_step: int = 1,
    width: int = 7, extra: Extra = None, upload: Uploader | None = None,
) -> tuple[dict[str, torch.Tensor], list[int]]:  # fmt: skip
    """Tensors of one rank of this mesh after restoring, and the shards that it opened."""
    opened = []

    def open_shard(index: int) -> ShardInBytes:
        opened.append(index)
        if index not in files:
            raise UnreadableCheckpoint(f"shard {index} is in no memory: lost")
        return ShardInBytes(files[index], f"shard {index}")

    model, optimizer = build(replicate, shard, seed=2, width=width)
    state = TrainingState(model, optimizer, extra)
    values = restore(
        state,
        open_shard,
        shard=rank,
        num_shards=shard,
        num_stored=len(files),
        step=after_step,
        upload=upload,
    )
    state.import_extra(values)
    return {held.name: held.local.clone() for held in state.tensors()}, opened
