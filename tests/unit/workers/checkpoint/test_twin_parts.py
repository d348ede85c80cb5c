"""Several ranks write one shard file together, each a part."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.workers.agent.storage import memfd
from holdfast.workers.checkpoint.layout import Box, Entry, encode_extra, make_layout, parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState
from holdfast.workers.checkpoint.twin_parts import SAMPLE_ROOM, WritableBuffer, divide

from .fake_device import FakeDevice
from .fake_ranks import restore_alone, staged_alone

IDENTITY = {"generation": 1, "shard": 0, "num_shards": 1}


class Net(nn.Module):
    """Batch norm statistics differ between the ranks of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11)
        self.second = nn.Linear(11, 4)


class TwinMemory:
    """One buffer that all twins write; `part` is the one whose turn it is."""

    def __init__(self, parts: int) -> None:
        self.parts, self.part = parts, 0
        self.layouts: set[int] = set()
        self.samples: set[int] = set()
        self.fd = os.memfd_create("buffer")
        self.memory: mmap.mmap | None = None
        self.num_bytes = 0

    def prepare_with(self, prepare: object) -> None:
        pass

    def request_buffers(self, num_bytes: int) -> None:
        if self.memory is None:
            os.ftruncate(self.fd, num_bytes)
            self.memory = mmap.mmap(self.fd, num_bytes)

    def take_buffer(self, step: int, num_bytes: int, layout: int) -> WritableBuffer:
        assert self.memory is not None and len(self.memory) >= num_bytes
        self.layouts.add(layout)
        return WritableBuffer(7, self.memory, self.part, self.parts)

    def put_back(self, buffer: int) -> None:
        raise AssertionError("nothing was written meanwhile")

    def staged(self, buffer: int, step: int, num_bytes: int, sample: int = 0) -> None:
        self.num_bytes = num_bytes
        self.samples.add(sample)

    def file(self) -> bytes:
        memfd.seal(self.fd)
        return os.pread(self.fd, self.num_bytes, 0)


@pytest.fixture
def twins() -> Iterator[tuple[list[Net], list[torch.optim.AdamW]]]:
    """Three ranks of DDP after two steps: equal, except for the statistics of batch norm."""
    torch.manual_seed(1)
    models = [Net() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(2):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.norm.running_mean.fill_(rank)
            torch.manual_seed(10 + step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    yield models, optimizers


def stage(
    memory: TwinMemory, models: list[Net], optimizers: list[torch.optim.AdamW], step: int = 1
) -> list[Stager]:
    stagers = []
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        state = TrainingState(model, optimizer, {"rank": rank})
        stagers.append(Stager(state, memory, device=torch.device("cpu"), **IDENTITY))
    for part in reversed(range(len(stagers))):  # any order
        memory.part = part
        stagers[part].stage(step)
    return stagers


Twins = tuple[list[Net], list[torch.optim.AdamW]]


def test_the_file_that_twins_write_together_is_that_of_the_first_one_alone(twins: Twins) -> None:
    models, optimizers = twins
    memory = TwinMemory(3)
    stage(memory, models, optimizers)
    assert memory.file() == staged_alone(models[0], optimizers[0], {"rank": 0}, step=1)
    assert len(memory.layouts) == len(memory.samples) == 1


def test_twins_that_were_not_averaged_show_it(twins: Twins) -> None:
    models, optimizers = twins
    for parameter in models[2].parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[2].step()
    memory = TwinMemory(3)
    stage(memory, models, optimizers)
    assert len(memory.layouts) == 1 and len(memory.samples) == 2


def test_each_twin_copies_its_part_only(twins: Twins) -> None:
    models, optimizers = twins
    memory = TwinMemory(3)
    for stager in stage(memory, models, optimizers):
        (targets,) = stager._targets.values()
        total = sum(entry.num_bytes for entry in stager._layout.entries)  # type: ignore[union-attr]
        largest = max(entry.num_bytes for entry in stager._layout.entries)  # type: ignore[union-attr]
        copied = sum(target.nbytes for target in targets)
        assert copied <= total / 3 + largest + SAMPLE_ROOM / 3


def test_a_step_is_staged_over_the_one_before_and_restores(twins: Twins) -> None:
    models, optimizers = twins
    memory = TwinMemory(3)
    stagers = stage(memory, models, optimizers)
    for model in models:
        with torch.no_grad():
            model.first.weight.mul_(2)
    for part, stager in enumerate(stagers):
        memory.part = part
        stager.stage(2)
    restored, extra = Net(), {"rank": -1}
    optimizer = torch.optim.AdamW(restored.parameters(), lr=0.5)
    restore_alone(memory.file(), restored, optimizer, extra, step=2)
    assert extra == {"rank": 0} and optimizer.param_groups[0]["lr"] == 0.01
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(restored.state_dict()[name], tensor), name
    assert torch.equal(restored.norm.running_mean, torch.zeros(11)), "of one rank, not mixed"


def test_layouts_of_twins_with_different_state_differ(twins: Twins) -> None:
    models, optimizers = twins
    optimizers[2] = torch.optim.SGD(models[2].parameters())  # type: ignore[call-overload]
    memory = TwinMemory(3)
    stage(memory, models, optimizers)
    assert len(memory.layouts) == 2


def test_extra_state_of_other_length_has_the_same_layout() -> None:
    entries = [Entry("model.a", "F32", Box((3,), (0,), (3,)))]
    layouts = {
        make_layout(entries, extra=encode_extra({"seen": 10**n}), **IDENTITY).digest
        for n in range(15)
    }
    assert len(layouts) == 1


SIZES = st.lists(st.integers(min_value=0, max_value=10**6), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, parts=st.integers(min_value=1, max_value=9), every=st.integers(2, 9))
def test_each_entry_is_in_one_part_and_parts_are_about_equal(
    sizes: list[int], parts: int, every: int
) -> None:
    entries = [Entry(f"model.{i}", "U8", Box((n,), (0,), (n,))) for i, n in enumerate(sizes)]
    layout = make_layout(entries, extra=b"{}", **IDENTITY)
    first = frozenset(entry.name for entry in entries[::every])
    found = divide(layout.entries, parts, first)
    assert len(found) == parts
    assert sorted(index for part in found for index in part) == list(range(len(entries)))
    held = [sum(layout.entries[index].num_bytes for index in part) for part in found]
    own = sum(entry.num_bytes for entry in layout.entries if entry.name in first)
    assert max(held) <= max(sum(sizes) / parts, own) + max(sizes)
    assert {index for index, e in enumerate(layout.entries) if e.name in first} <= set(found[0])


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, parts=st.integers(min_value=1, max_value=9))
def test_the_parts_write_each_byte_of_the_header_once(sizes: list[int], parts: int) -> None:
    entries = [Entry(f"model.{i}", "U8", Box((n,), (0,), (n,))) for i, n in enumerate(sizes)]
    layout = make_layout(entries, extra=b"{}", **IDENTITY)
    ranges = [
        one
        for part, indices in enumerate(divide(layout.entries, parts, ()))
        for one in layout.header_ranges(indices, first=part == 0)
    ]
    written = [at for begin, end in ranges for at in range(begin, end)]
    assert sorted(written) == list(range(layout.data_start))


def test_twins_on_a_device_copy_their_part_only() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    memory, devices = TwinMemory(4), [FakeDevice() for _ in range(4)]
    for part, device in enumerate(devices):
        memory.part = part
        state = TrainingState(model, optimizer, None)
        stager = Stager(state, memory, device=device, **IDENTITY)
        stager.stage(0)
        device.run()
        assert stager.finish()
    alone = staged_alone(model, optimizer)
    assert memory.file() == alone
    largest = 128 * 128 * 4
    for device in devices:
        assert device.copied_bytes <= len(alone) / 4 + largest + SAMPLE_ROOM


def test_a_buffer_that_is_not_sealed_is_refused(twins: Twins) -> None:
    models, optimizers = twins
    memory = TwinMemory(3)
    stage(memory, models, optimizers)
    unsealed = os.pread(memory.fd, memory.num_bytes, 0)
    with pytest.raises(Exception, match="the checksum of its header"):
        parse_header(unsealed, "the buffer")
