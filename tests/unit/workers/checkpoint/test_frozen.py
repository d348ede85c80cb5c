"""Parameters that are not trained, as the base of a LoRA: copied once per buffer, in every file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.workers.checkpoint import stage
from holdfast.workers.checkpoint.device import CudaDevice, bit_sum
from holdfast.workers.checkpoint.layout import Bytes, copy_and_hash, hash_bytes, parse_header
from holdfast.workers.checkpoint.stage import Stager
from holdfast.workers.checkpoint.state import TrainingState

from .fake_device import FakeDevice
from .fake_ranks import Memory

BASE_BYTES = 64 * 64 * 4


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down = nn.Linear(64, 2, bias=False)


class Rig:
    """A LoRA that is staged, on the CPU or from a fake device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_device: bool) -> None:
        torch.manual_seed(1)
        self.model, self.memory = Lora(), Memory()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.device = FakeDevice() if on_device else None
        self._copied = 0
        monkeypatch.setattr(stage, "copy_and_hash", self._count)
        self.stager = Stager(
            TrainingState(self.model, self.optimizer, None), self.memory,
            generation=1, shard=0, num_shards=1, device=self.device or torch.device("cpu"),
        )  # fmt: skip

    def _count(self, target: Bytes, source: Bytes) -> int:
        self._copied += source.nbytes
        return copy_and_hash(target, source)

    @property
    def copied_bytes(self) -> int:
        return self.device.copied_bytes if self.device else self._copied

    def stage(self, step: int, then: Callable[[], None] = lambda: None) -> bool:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.stager.stage(step)
        then()
        if self.device:
            self.device.run()
        return self.stager.finish()

    def expect_whole(self, step: int) -> None:
        """The last staged file has the parameters as they are, and true checksums."""
        header = parse_header(self.memory.file, "file")
        assert header.step == step
        for name, parameter in self.model.named_parameters():
            entry = header.entries[f"model.{name}"]
            begin = header.data_start + entry.begin
            stored = self.memory.file[begin : header.data_start + entry.end]
            assert stored == parameter.detach().numpy().tobytes()
            assert entry.checksum == f"{hash_bytes(np.frombuffer(stored, dtype=np.uint8)):016x}"


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, on_device=request.param)


def test_a_frozen_parameter_is_copied_once_and_is_in_every_file(rig: Rig) -> None:
    assert rig.stage(0)
    rig.expect_whole(0)
    first = rig.copied_bytes
    assert first > BASE_BYTES
    for step in (1, 2, 3):
        assert rig.stage(step)
        rig.expect_whole(step)
    assert rig.copied_bytes == first + 3 * (first - BASE_BYTES)


def test_a_parameter_that_is_trained_later_is_copied_from_then_on(rig: Rig) -> None:
    rig.stage(0)
    rig.model.base.requires_grad_(True)
    before = rig.copied_bytes
    for step in (1, 2):
        assert rig.stage(step)
        rig.expect_whole(step)
    assert rig.copied_bytes >= before + 2 * BASE_BYTES


@pytest.mark.parametrize("unseen", [False, True], ids=["in place", "through .data"])
def test_a_frozen_parameter_that_is_written_is_never_stale(
    rig: Rig, unseen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A moving average, for example. torch does not count writes through `.data`."""
    rig.stage(0)
    rig.stage(1)
    with torch.no_grad():
        weight = rig.model.base.weight
        (weight.data if unseen else weight).mul_(0.5)
    kept = rig.stage(2)
    assert kept == (rig.device is None)
    if rig.device:
        assert "requires_grad False, but was written" in capsys.readouterr().err
        assert parse_header(rig.memory.file, "file").step == 1
    assert rig.stage(3)
    rig.expect_whole(3)


def test_one_that_is_written_after_every_step_is_staged_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, on_device=True)

    def average() -> None:
        with torch.no_grad():
            rig.model.base.weight.mul_(0.5)

    kept = [rig.stage(step, then=average) for step in range(5)]
    assert kept[-2:] == [True, True]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_bits_sees_a_change_of_one_value(dtype: torch.dtype) -> None:
    values = torch.linspace(1, 2, 24).reshape(4, 6).t().to(dtype)
    before = int(bit_sum(values))
    assert int(bit_sum(values.clone())) == before
    changed = values.clone()
    changed[1, 2] = 0.5
    assert int(bit_sum(changed)) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_bits_copies_nothing(dtype: torch.dtype) -> None:
    values = torch.ones(1000, 8).to(dtype)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        bit_sum(values)
    assert max(event.cpu_memory_usage for event in profile.function_events) < 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_of_bits_on_a_gpu_are_those_of_the_cpu() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    values = [torch.randn(100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    device.follow_training()
    sums = device.bit_sums([one.cuda() for one in values])
    device.wait(device.record())
    assert sums() == [int(bit_sum(one)) for one in values]
